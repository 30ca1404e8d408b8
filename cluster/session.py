"""A local Ray session: started for ``paceline serve`` and tests, and ended without a trace."""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "PACELINE_SESSION"


def mark() -> None:
    """Have all that this process starts from now on bear a mark of its own."""
    os.environ[MARK] = secrets.token_hex(8)


def unmark() -> None:
    """The session has ended."""
    os.environ.pop(MARK, None)


def orphans() -> dict[int, float]:
    """Pid and start time of what bears this process's mark and is not below it any more."""
    own = os.environ.get(MARK)
    if own is None:
        return {}
    this = psutil.Process()
    below = {this.pid, *(child.pid for child in this.children(recursive=True))}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # others' processes do not tell
            if process.pid not in below and process.environ().get(MARK) == own:
                found[process.pid] = process.create_time()
    return found


NAMESPACE = "paceline"
LOOPBACK = "127.0.0.1"
GRACE_S = 8.0

_ENVIRONMENT = {
    # 15 unless told otherwise; serving must not be nice, trainers lower themselves.
    "RAY_worker_niceness": "0",
    # Calls that the dashboard can list. With Ray's 100,000 its control store grew by 4 MiB a
    # minute under traffic for as long as it was watched.
    "RAY_task_events_max_num_task_in_gcs": "10000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

logger = logging.getLogger(__name__)

_started: dict[int, float] = {}  # pid and start time of the session's own processes
_core: set[int] = set()  # those of them without which nothing in Ray answers
_killed = threading.Event()


def thread_environment(num_threads: int) -> dict[str, str]:
    """``env_vars`` of a runtime_env that bind a process's numeric libraries to some threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(num_threads))


def start_ray(
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    dashboard: bool = False,
    dashboard_port: int = 8265,
    object_store_mb: int | None = None,
    log_to_driver: bool = False,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a Ray of one's own on this machine and connect to it, namespace ``paceline``.

    It listens on loopback, but for its export of metrics, which Ray binds to every interface.

    Ray's own default writes its access token to a file in the home directory; here the token
    lives in the environment of the session's processes only. ``RAY_AUTH_MODE`` and
    ``RAY_AUTH_TOKEN``, where set, win.

    Args:
        num_cpus: what Ray books; None takes the machine's count.
        num_gpus: the same of GPUs, which need not be there.
        dashboard: whether to start Ray's dashboard.
        dashboard_port: its port on loopback.
        object_store_mb: size of shared memory; None leaves it to Ray.
        log_to_driver: whether workers' output reaches this terminal.
        environment: more variables for every process of the session.

    Raises:
        RuntimeError: where this process is connected to a Ray already.
    """
    for name, value in (_ENVIRONMENT | dict(environment or {})).items():
        os.environ.setdefault(name, value)
    _own_token()
    _init(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=dashboard,
        dashboard_port=dashboard_port,
        object_store_memory=None if object_store_mb is None else object_store_mb * 2**20,
        log_to_driver=log_to_driver,
        logging_level=logging.INFO if log_to_driver else logging.ERROR,
    )


def _init(**options: Any) -> None:
    """``ray.init`` on loopback; the processes that it starts are noted, also where it fails."""
    import ray  # after the environment: Ray reads parts of it when it is imported

    if ray.is_initialized():
        again = "cannot have another: its last was killed" if was_killed() else "has one already"
        raise RuntimeError(f"this process is connected to a Ray session, and {again}")
    _started.clear()
    _core.clear()
    mark()
    before = _children()

    def start() -> None:
        try:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                dashboard_host=LOOPBACK,
                _node_ip_address=LOOPBACK,
                **options,
            )
        finally:
            _note(before)

    try:
        _uninterrupted(start)
    except BaseException:
        _note(before)
        _kill_all(beyond_ray=bool(_core))  # Ray's own end hangs where half of it still comes up
        raise


def _note(before: Mapping[int, float]) -> None:
    """Remember what runs below this process now, but for what did before."""
    _started.update({pid: at for pid, at in _children().items() if pid not in before})
    _core.update(p.pid for p in _alive(_started) if p.name() in ("gcs_server", "raylet"))


def _uninterrupted(call: Callable[[], object]) -> None:
    """Run Ray's start to its end, whatever signals come meanwhile; they take effect afterwards.

    Half a start leaves processes behind that are nobody's children, and that Ray's store, which
    is gone, keeps waiting. Signal handlers run in the main thread, so the call has another. Once
    interrupted, it has ``GRACE_S`` to end: the signal may have gone to Ray's processes too.

    Raises:
        BaseException: the first that a handler raised, or else what the call raised.
    """
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    done: Future[None] = Future()
    threading.Thread(target=_stay, args=(call, done), daemon=True).start()
    interruption: BaseException | None = None
    deadline = math.inf
    while True:
        try:
            while not done.done() and time.monotonic() < deadline:
                wait([done], timeout=0.02)
                _keep_handler(signal.SIGTERM)
                if interruption is not None:
                    signal.alarm(0)
            break
        except BaseException as error:
            if interruption is None:
                interruption, deadline = error, time.monotonic() + GRACE_S
    if interruption is not None:
        raise interruption
    done.result()


def _keep_handler(number: int) -> None:
    """Put a signal's handler in place again.

    Ray's native one, which its start installs, writes a stack and aborts after three seconds.
    """
    handler = signal.getsignal(number)
    if handler is not None:
        signal.signal(number, handler)


def _stay(call: Callable[[], object], done: Future[None]) -> None:
    """Call, tell, and stay: the kernel kills Ray's processes when the *thread* they are of ends."""
    try:
        call()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    threading.Event().wait()


def is_whole() -> bool:
    """Whether the session's core, its store and its node's daemon, still runs.

    Without them every call into Ray waits a minute for them to come back.
    """
    return _core <= {process.pid for process in _alive(_started)}


def was_killed() -> bool:
    """Whether a session had to be killed: Ray's threads in this process then crash at its end."""
    return _killed.is_set()


def run_bounded(call: Callable[[], None], seconds: float) -> bool:
    """Run a call into Ray, but wait no longer than this, nor for a session that has died.

    Returns:
        False where the call was left behind unfinished; it goes on in a thread of its own.
    """
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline and is_whole():
        thread.join(0.05)
    return not thread.is_alive()


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        logger.warning("could not end a part cleanly", exc_info=True)


def stop_ray() -> None:
    """End the session that :func:`start_ray` began, and every process of it.

    Processes that outlive Ray's own shutdown by some seconds are killed by their id. A second
    call does nothing.
    """
    import ray

    if not _started:
        return
    _started.update(_descendants(_started))
    deadline = time.monotonic() + GRACE_S
    if ray.is_initialized() and is_whole():
        run_bounded(ray.shutdown, GRACE_S)
    hangs = ray.is_initialized()
    while not hangs and _alive(_started) and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill_all(beyond_ray=hangs)


def _kill_all(*, beyond_ray: bool) -> None:
    """Kill every process of the session, and what these have started meanwhile.

    Args:
        beyond_ray: Ray has not ended its part in this process, and cannot any more.
    """
    import ray

    if beyond_ray:
        atexit.unregister(ray.shutdown)  # at the interpreter's end it would wait for the dead
        _killed.set()
    for process in _alive(_started):
        if process.pid in _core:
            with suppress(psutil.Error):
                process.suspend()  # it starts no more
    _started.update(_descendants(_started) | orphans())
    left = _alive(_started)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    _started.clear()
    _core.clear()
    unmark()


@contextmanager
def ray_session(**options: Any) -> Iterator[None]:
    """:func:`start_ray` with these options, :func:`stop_ray` at the end."""
    start_ray(**options)
    try:
        yield
    finally:
        stop_ray()


def _own_token() -> None:
    """A token for this session in the environment, unless the user has chosen otherwise."""
    chosen = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in chosen) or (Path.home() / ".ray" / "auth_token").exists():
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _children() -> dict[int, float]:
    """Pid and start time of everything below this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.pid] = process.create_time()
        except psutil.Error:
            continue
    return found


def _descendants(roots: Mapping[int, float]) -> dict[int, float]:
    """Pid and start time of everything below the given processes."""
    found = {}
    for process in _alive(roots):
        try:
            for child in process.children(recursive=True):
                found[child.pid] = child.create_time()
        except psutil.Error:
            continue
    return found


def _alive(started: Mapping[int, float]) -> list[psutil.Process]:
    """Those of the processes that still run; a reused pid has another start time."""
    alive = []
    for pid, at in started.items():
        try:
            process = psutil.Process(pid)
            if process.create_time() == at and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            continue
    return alive
