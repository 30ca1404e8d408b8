"""A local Ray session for ``paceline serve`` and tests, which leaves no process behind."""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

MARK = "PACELINE_SESSION"  # environment variable of every process of the session
NAMESPACE = "paceline"
LOOPBACK = "127.0.0.1"
GRACE_S = 8.0

_ENVIRONMENT = {
    # Ray's default is 15; trainers lower their priority themselves.
    "RAY_worker_niceness": "0",
    # Calls that the dashboard can list. With Ray's 100,000 its control store grows by 4 MiB a
    # minute under traffic.
    "RAY_task_events_max_num_task_in_gcs": "10000",
    # By default every Ray process reports its calls each second and times what its event loop does:
    # together some 30 ms of processor time a second.
    "RAY_task_events_report_interval_ms": "10000",
    "RAY_event_stats": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

T = TypeVar("T")

logger = logging.getLogger(__name__)

_started: dict[int, float] = {}  # pid to start time of the session's processes
_core: set[int] = set()  # pids of Ray's control store and raylet
_callers: list[threading.Thread] = []  # that call into Ray, or have done
_killed = threading.Event()


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment variables that limit numeric libraries to so many threads.

    OpenMP's threads sleep when they have no work. By default they spin for milliseconds after each
    parallel operation of torch, on the cores that the engine's own threads need.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {"OMP_WAIT_POLICY": "passive"} | dict.fromkeys(names, str(num_threads))


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
    """Start Ray on this machine and connect to it, namespace ``paceline``.

    It listens on loopback, except for its metrics, which Ray exports on every interface. Its
    access token is in the environment of the session's processes only, unless ``RAY_AUTH_MODE``
    or ``RAY_AUTH_TOKEN`` is set; Ray by itself would write it to the home directory.

    Args:
        num_cpus: that Ray can book; None for the machine's.
        num_gpus: that Ray can book, which need not exist.
        dashboard: whether to start Ray's dashboard.
        dashboard_port: its port on loopback.
        object_store_mb: size of shared memory; None for Ray's default.
        log_to_driver: whether workers write to this terminal.
        environment: further variables of every process of the session.

    Raises:
        RuntimeError: this process is connected to a Ray already.
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
    """``ray.init`` on loopback; records the processes that it starts, even if it fails."""
    import ray  # reads the environment when it is imported
    from ray._private import auto_init_hook

    # A call that took too long goes on in its thread: its next must not start another session.
    auto_init_hook.enable_auto_connect = False
    if ray.is_initialized():
        again = "cannot have another: its last was killed" if was_killed() else "has one already"
        raise RuntimeError(f"this process is connected to a Ray session, and {again}")
    _started.clear()
    _core.clear()
    os.environ[MARK] = secrets.token_hex(8)
    before = _children()

    def start() -> None:
        try:
            with _own_process_groups():
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    dashboard_host=LOOPBACK,
                    _node_ip_address=LOOPBACK,
                    **options,
                )
            if not options["log_to_driver"]:
                _end_log_monitor()
        finally:
            _record(before)

    try:
        _uninterrupted(start)
    except BaseException:
        _record(before)
        _kill_all(beyond_ray=bool(_core))  # ray.shutdown hangs after half a start
        raise


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Start Ray's processes in groups of their own, as Ray itself does on Windows.

    A signal to this process's group, as ``timeout`` sends it, would end them under the requests
    that a stop waits for. If this process is killed, the kernel ends them, and the raylet's agents
    follow within a minute; on other systems than Linux a process kills their common group.
    """
    from ray._private import services  # there is no public option

    popen = services.ConsolePopen
    if sys.platform == "linux":
        services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _end_log_monitor() -> None:
    """End the process that reads logs for this terminal, which wants none of them.

    It looks at every log ten times a second: a hundredth of a core. Nothing watches it.
    """
    from ray._private import worker  # there is no public option

    worker._global_node.kill_log_monitor(check_alive=False)


def _record(before: Mapping[int, float]) -> None:
    """Record this process's descendants that are not in ``before``."""
    _started.update({pid: at for pid, at in _children().items() if pid not in before})
    _core.update(p.pid for p in _alive(_started) if p.name() in ("gcs_server", "raylet"))


def _uninterrupted(call: Callable[[], object]) -> None:
    """Complete Ray's start before signals take effect.

    Half a start leaves orphaned processes behind. Signal handlers run in the main thread, so the
    call runs in another. After a signal it has ``GRACE_S`` to complete: Ray's processes may have
    got the signal too.

    Raises:
        BaseException: the first that a handler raised, or else what the call raised.
    """
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    done: Future[None] = Future()
    threading.Thread(target=_call_and_stay, args=(call, done), daemon=True).start()
    interruption: BaseException | None = None
    deadline = math.inf
    while True:
        try:
            while not done.done() and time.monotonic() < deadline:
                wait([done], timeout=0.02)
                _restore_handler(signal.SIGTERM)
                if interruption is not None:
                    signal.alarm(0)
            break
        except BaseException as error:
            if interruption is None:
                interruption, deadline = error, time.monotonic() + GRACE_S
    if interruption is not None:
        raise interruption
    done.result()


def _restore_handler(number: int) -> None:
    """Install Python's handler again: Ray's native one writes a stack and aborts."""
    handler = signal.getsignal(number)
    if handler is not None:
        signal.signal(number, handler)


def _call_and_stay(call: Callable[[], T], done: Future[T]) -> None:
    """Call, then wait for ever: the kernel kills Ray's processes with their parent thread."""
    _settle(call, done)
    threading.Event().wait()


def is_whole() -> bool:
    """Whether control store and raylet run; without them every call into Ray takes a minute."""
    return len(_alive({pid: _started.get(pid, 0.0) for pid in _core})) == len(_core)


def was_killed() -> bool:
    """Whether a session had to be killed: Ray's threads then crash at the end of this process."""
    return _killed.is_set()


def in_background(call: Callable[[], T]) -> Future[T]:
    """Call into Ray in a daemon thread: the exit does not wait for it.

    An executor would join its thread, even after a signal; in a dead session that takes minutes.
    """
    done: Future[T] = Future()
    _start_caller(lambda: _settle(call, done))
    return done


def _settle(call: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)


def run_bounded(call: Callable[[], None], seconds: float) -> bool:
    """Run a call into Ray for at most so long, and not after the session has died.

    Returns:
        False if the call has not completed; it continues in a thread.
    """
    thread = _start_caller(lambda: _quietly(call))
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline and is_whole():
        thread.join(0.05)
    return not thread.is_alive()


def _start_caller(call: Callable[[], None]) -> threading.Thread:
    """Call in a daemon thread, beneath which :func:`stop_ray` does not shut Ray down."""
    thread = threading.Thread(target=call, daemon=True)
    _callers.append(thread)
    thread.start()
    return thread


def _ray_is_called() -> bool:
    return any(thread.is_alive() for thread in _callers)


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        if not was_killed():  # then nothing could
            logger.warning("a part did not end cleanly", exc_info=True)


def stop_ray() -> None:
    """End the session of :func:`start_ray`; kill processes that outlive Ray's shutdown by seconds.

    A second call does nothing. If a call into Ray goes on for seconds too, everything is killed,
    and this process can start no further session.
    """
    import ray

    if not _started:
        return
    _started.update(_descendants(_started))
    deadline = time.monotonic() + GRACE_S
    # A thread that calls into Ray after its shutdown ends this process, with Ray's exit code.
    while is_whole() and _ray_is_called() and time.monotonic() < deadline - GRACE_S / 2:
        time.sleep(0.05)
    if ray.is_initialized() and is_whole() and not _ray_is_called():
        run_bounded(ray.shutdown, deadline - time.monotonic())
    hangs = ray.is_initialized()
    while not hangs and _alive(_started) and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill_all(beyond_ray=hangs)


def _kill_all(*, beyond_ray: bool) -> None:
    """Kill every process of the session, and their descendants.

    Args:
        beyond_ray: ``ray.shutdown`` has not completed in this process and no longer can.
    """
    import ray

    if beyond_ray:
        atexit.unregister(ray.shutdown)  # at exit it would wait for dead processes
        _killed.set()
    for process in _alive(_started):
        if process.pid in _core:
            with suppress(psutil.Error):
                process.suspend()  # starts no further processes
    _started.update(_descendants(_started) | orphans())
    left = _alive(_started)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    _started.clear()
    _core.clear()
    os.environ.pop(MARK, None)


@contextmanager
def ray_session(**options: Any) -> Iterator[None]:
    """:func:`start_ray` with these options, :func:`stop_ray` at the end."""
    start_ray(**options)
    try:
        yield
    finally:
        stop_ray()


def _own_token() -> None:
    """Set an access token in the environment unless the user has chosen one."""
    chosen = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in chosen) or (Path.home() / ".ray" / "auth_token").exists():
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def orphans() -> dict[int, float]:
    """Pid to start time of the session's processes that are no descendants of this one."""
    own = os.environ.get(MARK)
    if own is None:
        return {}
    descendants = {psutil.Process().pid, *_children()}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # other users' processes
            if process.pid not in descendants and process.environ().get(MARK) == own:
                found[process.pid] = process.create_time()
    return found


def _children() -> dict[int, float]:
    """Pid to start time of the descendants of this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.pid] = process.create_time()
        except psutil.Error:
            continue
    return found


def _descendants(roots: Mapping[int, float]) -> dict[int, float]:
    """Pid to start time of the descendants of these processes."""
    found = {}
    for process in _alive(roots):
        try:
            for child in process.children(recursive=True):
                found[child.pid] = child.create_time()
        except psutil.Error:
            continue
    return found


def _alive(started: Mapping[int, float]) -> list[psutil.Process]:
    """Processes that still run; a reused pid has another start time."""
    alive = []
    for pid, at in started.items():
        try:
            process = psutil.Process(pid)
            if process.create_time() == at and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            continue
    return alive
