"""What is refused before any process starts, each in one line."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import FIXTURES, SMALL_MODELS
from free_ports import find_port
from safetensors.torch import load_file, save_file

from paceline.actors.weights.state_folder import LOCK_NAME
from paceline.cluster.placement import find_misfit
from paceline.deploy import app, learning
from paceline.deploy.config import learning_settings, preflight, replica_settings
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.preflight import check, router_confidence, warnings
from paceline.deploy.errors import ConfigError

Change = Callable[[Path], object]


@pytest.fixture
def config(tmp_path: Path) -> PacelineConfig:
    """The small models on a free port, with a state folder of its own."""
    own = {"port": find_port(), "ray.dashboard_port": find_port()}
    return load_config(None, SMALL_MODELS | own | {"state_dir": str(tmp_path / "state")})


def changed(config: PacelineConfig, changes: dict[str, Any]) -> PacelineConfig:
    data = config.model_dump()
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (data[section] if section else data)[name] = value
    return PacelineConfig.model_validate(data)


def refusal(config: PacelineConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def copied(tmp_path: Path, model: str, change: Change) -> str:
    """A copy of a model, changed."""
    folder = tmp_path / model
    shutil.copytree(FIXTURES / model, folder)
    change(folder)
    return str(folder)


def with_config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def test_the_small_models_pass(config: PacelineConfig) -> None:
    check(config)
    check(config)  # nothing is held on to
    assert warnings(config) == []


def test_a_cache_by_key_needs_keys(config: PacelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_API_KEYS", raising=False)
    apart = changed(config, {"target.prefix_cache": "key"})
    assert refusal(apart).startswith("target.prefix_cache: ")
    check(changed(apart, {"auth.keys": {"acme": {"sha256": "0" * 64}}}))
    monkeypatch.setenv("PACELINE_API_KEYS", "a-key")
    check(apart)


def test_a_model_that_was_not_fetched_is_named_with_its_command(
    config: PacelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    assert "`paceline models smollm2`" in refusal(changed(config, {"target.path": "smollm2"}))
    said = refusal(changed(config, {"router.path": "minilm"}))
    assert said.startswith("router.path: ")
    assert "`paceline models minilm`" in said


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("key", "model", "change", "said"),
    [
        ("target.path", "target", write("tokenizer.json", POINTER), "tokenizer.json is not JSON"),
        (
            "target.path",
            "target",
            write("generation_config.json", "{"),
            "generation_config.json is not JSON",
        ),
        (
            "target.path",
            "target",
            write("generation_config.json", '{"top_p": 1.5}'),
            "generation_config.json: top_p: Input should be less than or equal to 1",
        ),
        *(
            (
                "target.path",
                "target",
                write("generation_config.json", json.dumps({"eos_token_id": eos})),
                "generation_config.json: eos_token_id must be a token id or a list of them",
            )
            for eos in ("2", [2, "3"], {"id": 2}, True, 2.5)
        ),
        (
            "target.path",
            "target",
            write("tokenizer_config.json", "{"),
            "tokenizer_config.json is not JSON",
        ),
        (
            "drafts.general",
            "draft-general",
            write("tokenizer_config.json", "[]"),
            "tokenizer_config.json holds no JSON object",
        ),
        ("target.path", "target", write("tokenizer.json", "[]"), "holds no JSON object"),
        ("target.path", "target", write("tokenizer.json", "{}"), "is not a tokenizer's"),
        ("target.path", "target", write("config.json", "[]"), "holds no JSON object"),
        ("target.path", "target", with_config(max_position_embeddings=None), "max_model_len"),
        ("target.path", "target", with_config(is_encoder_decoder=True), "is an encoder-decoder"),
        ("drafts.general", "draft-general", write("tokenizer.json", POINTER), "draft general: "),
        (
            "drafts.general",
            "draft-general",
            with_config(max_position_embeddings=512),
            "set target.max_model_len to 512 or less",
        ),
        (
            "drafts.general",
            "draft-general",
            with_config(head="shared"),
            "draft general: head: shared: its hidden_size is 256, the target's 384",
        ),
        ("router.path", "router", write("config.json", "{"), "router: "),
        ("router.path", "router", with_config(id2label=None), "names no topics"),
        ("router.path", "router", with_config(min_confidence="high"), "min_confidence"),
        ("router.path", "router", with_config(min_confidence=1.5), "min_confidence"),
    ],
)
def test_a_broken_model_folder_is_named(
    config: PacelineConfig, tmp_path: Path, key: str, model: str, change: Change, said: str
) -> None:
    assert said in refusal(changed(config, {key: copied(tmp_path, model, change)}))


@pytest.mark.parametrize("eos", [None, 2, [2, 3], []])
def test_end_of_sequence_tokens_are_one_several_or_none(
    config: PacelineConfig, tmp_path: Path, eos: Any
) -> None:
    own = write("generation_config.json", json.dumps({"eos_token_id": eos}))
    check(changed(config, {"target.path": copied(tmp_path, "target", own)}))


def test_sampling_defaults_that_are_switched_off_are_not_checked(
    config: PacelineConfig, tmp_path: Path
) -> None:
    folder = copied(tmp_path, "target", write("generation_config.json", '{"top_p": 1.5}'))
    check(changed(config, {"target.path": folder, "target.generation_config": "none"}))


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def sharded(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_tensors(lambda state: state.pop(NORM)), f"its files lack {NORM}"),
        (
            with_tensors(lambda state: state.update({NORM: torch.zeros(5)})),
            f"wrong shape of {NORM} (the file has [5], the config asks for [",
        ),
        (with_config(num_hidden_layers=9), "its files lack model.layers."),
        (
            with_tensors(lambda state: state.update({NORM.replace("0", "9"): state[NORM].clone()})),
            f"the config has fewer layers than the files, which hold {NORM.replace('0', '9')}",
        ),
        (with_config(tie_word_embeddings=False), "its files lack lm_head.weight"),
        (torn, "model.safetensors cannot be read"),
        (sharded, "lacks model-00001-of-00002.safetensors"),
    ],
)
@pytest.mark.parametrize("key", ["target.path", "drafts.general"])
def test_files_without_what_the_config_asks_for_are_refused_by_their_tensors(
    config: PacelineConfig, tmp_path: Path, key: str, change: Change, said: str
) -> None:
    model = "target" if key == "target.path" else "draft-general"
    text = refusal(changed(config, {key: copied(tmp_path, model, change)}))
    assert said in text
    assert text.startswith("target: " if model == "target" else "draft general: ")


def test_further_tensors_are_ignored(config: PacelineConfig, tmp_path: Path) -> None:
    def more(folder: Path) -> None:
        with_tensors(lambda state: state.update({"vision.w": torch.zeros(2)}))(folder)
        save_file({"layers.0.wq.weight": torch.zeros(2)}, folder / "consolidated.safetensors")

    check(changed(config, {"drafts.general": copied(tmp_path, "draft-general", more)}))


def test_a_short_draft_serves_a_target_that_is_cut_to_it(
    config: PacelineConfig, tmp_path: Path
) -> None:
    short = copied(tmp_path, "draft-general", with_config(max_position_embeddings=512))
    check(changed(config, {"drafts.general": short, "target.max_model_len": 512}))


def test_more_context_than_the_target_has_is_refused(config: PacelineConfig) -> None:
    said = refusal(changed(config, {"target.max_model_len": 1025}))
    assert "target.max_model_len: 1025 tokens are wanted, the target has 1024 tokens" in said
    check(changed(config, {"target.max_model_len": 1024}))


def test_memory_for_less_than_one_request_is_refused(config: PacelineConfig) -> None:
    """65 blocks of 16 positions, 8 layers of 6 heads of 64 keys and values, 2 or 4 bytes each."""
    said = refusal(changed(config, {"target.kv_cache_mb": 12}))
    assert (
        "target.kv_cache_mb: 12 MiB do not hold one request of 1024 tokens, which takes 13" in said
    )
    check(changed(config, {"target.kv_cache_mb": 13}))
    check(changed(config, {"target.kv_cache_mb": 12, "target.max_model_len": 900}))
    wide = {"target.kv_cache_mb": 13, "target.dtype": "float32"}
    assert "which takes 25" in refusal(changed(config, wide))


def test_a_router_that_knows_none_of_the_topics_is_refused(config: PacelineConfig) -> None:
    said = refusal(changed(config, {"drafts.topics": ("law", "support")}))
    assert "none of drafts.topics (law, support)" in said
    assert "router.enabled to false" in said
    alone = changed(config, {"drafts.topics": ("law",), "router.enabled": False})
    check(alone)
    assert warnings(alone) == []


def test_how_sure_the_router_must_be_is_in_its_own_config(
    config: PacelineConfig, tmp_path: Path
) -> None:
    own = dict.fromkeys(("math", "code", "sql", "shell"), 0.99)
    assert router_confidence(config) == own
    settings = replica_settings.ingress_settings(config)
    assert settings.min_confidence == settings.topics.min_confidence == own
    silent = copied(tmp_path, "router", with_config(min_confidence=None))
    assert router_confidence(changed(config, {"router.path": silent})) == 0.5
    assert router_confidence(changed(config, {"router.enabled": False})) == 0.5
    assert router_confidence(changed(config, {"router.min_confidence": 0.7})) == 0.7


def test_a_router_that_knows_some_of_the_topics_is_warned_of(config: PacelineConfig) -> None:
    some = changed(config, {"drafts.topics": ("sql", "law")})
    check(some)
    (warning,) = warnings(some)
    assert "law" in warning
    assert "sql" not in warning


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(config: PacelineConfig) -> None:
    assert "target.device: cuda is not there" in refusal(changed(config, {"target.device": "cuda"}))


def test_a_state_folder_that_cannot_be_written_is_refused(
    config: PacelineConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/paceline")):
        assert refusal(changed(config, {"state_dir": str(place)})).startswith("state_dir: ")


def test_a_state_folder_of_a_running_server_is_refused(config: PacelineConfig) -> None:
    import fcntl

    lock = config.state_path / "weights" / LOCK_NAME
    lock.parent.mkdir(parents=True)
    with lock.open("wb") as held:  # a second open file: the lock is the file's, not the process's
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "in use by another server" in refusal(config)
    check(config)


@pytest.mark.parametrize("key", ["port", "ray.dashboard_port"])
def test_a_port_that_is_taken_is_refused_by_its_key(config: PacelineConfig, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        busy = changed(config, {key: number})
        assert refusal(busy).startswith(f"{key}: cannot listen on 127.0.0.1:{number} (")
    check(busy)


def test_a_dashboard_on_the_server_s_own_port_is_refused(config: PacelineConfig) -> None:
    same = changed(config, {"ray.dashboard_port": config.port})
    assert refusal(same).startswith(f"ray.dashboard_port: cannot listen on 127.0.0.1:{config.port}")
    everywhere = changed(same, {"host": "0.0.0.0"})
    assert refusal(everywhere).startswith("ray.dashboard_port: ")


def test_the_port_of_a_dashboard_that_is_off_is_not_checked(config: PacelineConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        off = {"ray.dashboard": False, "ray.dashboard_port": taken.getsockname()[1]}
        check(changed(config, off))


def test_a_pool_without_cores_for_it_is_warned_of(
    config: PacelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = changed(config, {"drafts.placement": "pool"})
    monkeypatch.setattr(preflight, "available_cores", lambda: 4)
    assert any("5 processes on 4 cores" in line for line in warnings(pool))
    assert warnings(config) == []
    monkeypatch.setattr(preflight, "available_cores", lambda: 64)
    assert warnings(pool) == []


def test_a_pool_needs_linux(config: PacelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert "drafts.placement" in refusal(changed(config, {"drafts.placement": "pool"}))


def test_experts_on_a_gpu_need_one(config: PacelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    pool = {"drafts.placement": "pool", "drafts.num_gpus": 0.1}
    check(changed(config, pool))
    on_cpu = refusal(changed(config, pool | {"target.device": "cpu"}))
    assert "drafts.num_gpus" in on_cpu
    assert "target.device" in on_cpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "drafts.num_gpus: 0.1 of a GPU" in refusal(changed(config, pool))
    check(changed(config, pool | {"drafts.placement": "colocated"}))  # the key is the pool's


def test_a_stage_that_cannot_work_is_refused(config: PacelineConfig) -> None:
    cpu = changed(config, {"target.device": "cpu"})
    assert "training.zero_stage: stage 3 splits" in refusal(
        changed(cpu, {"training.zero_stage": 3})
    )
    check(changed(cpu, {"training.zero_stage": 2}))
    check(changed(cpu, {"training.zero_stage": 3, "training.enabled": False}))


def test_ranks_on_gpus_need_one_each(
    config: PacelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check(changed(config, {"training.ranks": 2}))
    assert "training.ranks: 3 ranks" in refusal(changed(config, {"training.ranks": 3}))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 2.0})
    # the trainer's quarter, and a whole one for its second rank
    assert app._gpu_share(changed(config, {"training.ranks": 2})) == 0.75
    # a quarter for each of three
    assert app._gpu_share(changed(config, {"training.trainers": 3})) == 1
    assert app._gpu_share(changed(config, {"target.num_replicas": 2})) == 0.75
    with pytest.raises(ConfigError, match=r"training\.trainers: .* take 2 of 2 GPUs"):
        app._gpu_share(changed(config, {"training.trainers": 8}))
    with pytest.raises(ConfigError, match=r"training\.ranks: .* take 2\.25 of 2 GPUs"):
        app._gpu_share(changed(config, {"training.ranks": 3}))
    assert list(learning.trainer_factories(changed(config, {"training.trainers": 2}))) == [
        "paceline-trainer",
        "paceline-trainer-2",
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, None),
        ({"placement.learning": {"CPU": 1}}, "placement.learning"),  # of three processes
        ({"placement.ingress": {"front": 1}}, "placement.ingress"),
        ({"router.placement": "deployment", "placement.router": {"CPU": 3}}, "placement.router"),
        ({"placement.router": {"CPU": 3}}, None),  # it runs in the ingress
        ({"drafts.placement": "pool", "placement.experts": {"CPU": 3}}, "placement.experts"),
        ({"placement.target": {"CPU": 1}, "target.num_replicas": 3}, "placement.target"),
        ({"placement.target": {"CPU": 1}, "target.autoscaling": {"max_replicas": 3}}, None),
        ({"placement.trainer": {"CPU": 1}, "training.trainers": 3}, "placement.trainer"),
        ({"placement.trainer": {"CPU": 1}, "training.ranks": 3}, "training.ranks"),
        ({"placement.trainer": {"CPU": 3}, "training.enabled": False}, None),
    ],
)
def test_what_this_machine_cannot_place_is_refused_by_its_key(
    config: PacelineConfig,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    key: str | None,
) -> None:
    two = {"CPU": 2.0}
    monkeypatch.setattr("ray.cluster_resources", lambda: two)
    misfit = find_misfit(app._bookings(changed(config, changes)), two)
    assert (misfit and misfit.partition(":")[0]) == key


def test_ranks_without_cores_for_them_are_warned_of(
    config: PacelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = changed(config, {"training.ranks": 2, "target.device": "cpu"})
    monkeypatch.setattr(preflight, "available_cores", lambda: 2)
    assert any("2 processes step together on 2 cores" in line for line in warnings(ranks))
    trainers = changed(config, {"training.trainers": 3, "target.device": "cpu"})
    assert any("3 trainers take turns on 2 cores" in line for line in warnings(trainers))
    monkeypatch.setattr(preflight, "available_cores", lambda: 64)
    assert warnings(ranks) == warnings(trainers) == []


def test_what_is_configured_reaches_the_trainer(config: PacelineConfig) -> None:
    chosen = {
        "training.adapter": "lora",
        "training.lora_rank": 4,
        "training.lora_alpha": 6.0,
        "training.zero_stage": 2,
        "training.ranks": 3,
    }
    settings = learning_settings.trainer_settings(changed(config, chosen))
    distiller = settings.distiller
    assert (distiller.adapter, distiller.lora_rank, distiller.lora_alpha) == ("lora", 4, 6.0)
    assert (distiller.zero_stage, settings.ranks) == (2, 3)


def test_a_client_s_share_is_divided_among_the_ingress_replicas(config: PacelineConfig) -> None:
    shared = {"ingress.num_replicas": 3, "target.max_seqs_per_client": 8}
    assert replica_settings._per_client(changed(config, shared)) == 3
    assert replica_settings._per_client(changed(config, {"ingress.num_replicas": 3})) is None


def test_experts_that_take_all_gpus_are_refused(
    config: PacelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 1.0})
    pool = {"drafts.placement": "pool", "training.enabled": False}
    assert app._gpu_share(changed(config, pool | {"drafts.num_gpus": 0.1})) == 0.5
    with pytest.raises(ConfigError, match=r"drafts\.num_gpus: .* take 1 of 1 GPUs"):
        app._gpu_share(changed(config, pool | {"drafts.num_gpus": 0.2}))
