"""Typed configuration: defaults, overrides and one clear line for every mistake."""

from pathlib import Path

import pytest
import yaml

from paceline.deploy.config.config import MODELS_DIR, load_config
from paceline.deploy.config.sections import TrainingConfig
from paceline.deploy.errors import ConfigError
from paceline.deploy.model_store import cache_folder


def test_defaults_serve_on_loopback() -> None:
    config = load_config()
    assert (config.host, config.port, config.model_name) == ("127.0.0.1", 8000, "paceline")
    assert config.target_path == cache_folder() / "smollm2-0.1.2"
    assert config.draft_paths["sql"] == config.draft_paths["general"]
    assert config.drafts.experts == ("general", "math", "code", "sql", "shell")


def test_a_file_is_read_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("port: 9000\ntarget:\n  dtype: bfloat16\n  max_num_seqs: 4\n")
    config = load_config(file, {"target.dtype": "float32", "ray.dashboard": False})
    assert (config.port, config.target.max_num_seqs) == (9000, 4)
    assert config.target.dtype == "float32"
    assert not config.ray.dashboard


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert load_config(file) == load_config()


def test_state_outlives_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert load_config().state_path == Path("/somewhere/paceline")
    assert load_config(None, {"state_dir": "/else"}).state_path == Path("/else")


SCOPED = f"""
replay: {{scope: key}}
auth: {{keys: {{acme: {{sha256: {"a" * 64}}}, beta: {{sha256: {"b" * 64}}}}}}}
"""


def test_with_a_scope_by_key_every_key_has_every_expert_and_state_of_its_own(
    tmp_path: Path,
) -> None:
    file = tmp_path / "scoped.yaml"
    file.write_text(
        SCOPED + "state_dir: /else\ndrafts: {general: /g, topics: [sql], paths: {sql: /s}}"
    )
    config = load_config(file)
    assert config.draft_paths == {
        "general": Path("/g"),
        "acme.general": Path("/g"),
        "acme.sql": Path("/s"),
        "beta.general": Path("/g"),
        "beta.sql": Path("/s"),
    }
    assert config.state_path == Path("/else/by-key")  # what others taught is not taken over
    shared = load_config(file, {"replay.scope": "all"})
    assert shared.experts == ("general", "sql")
    assert (config.other_state_path, shared.other_state_path) == (
        shared.state_path,
        config.state_path,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 9000", "prot: no such key; did you mean port?"),
        ("target:\n  dtpye: auto", "target.dtpye: no such key; did you mean dtype?"),
        ("target:\n  xyzzy: 1", "target.xyzzy: no such key"),
        ("target:\n  dtype: int4", "target.dtype: "),
        ("port: eighty", "port: "),
        ("port: 0", "port: "),
        ("host: ''", "host: string should have at least 1 character"),
        ("port: 70000", "port: "),
        ("target: 3", "target: "),
        ("target:\n  max_model_len: 1", "target.max_model_len: input should be greater than or"),
        ("drafts:\n  num_speculative_tokens: -1", "drafts.num_speculative_tokens: "),
        ("drafts:\n  num_speculative_tokens: 33", "drafts.num_speculative_tokens: 33 is neither"),
        ("drafts:\n  num_speculative_tokens: often", "drafts.num_speculative_tokens: 'often' is"),
        ("drafts:\n  num_speculative_tokens: true", "drafts.num_speculative_tokens: true is"),
        ("drafts:\n  topics: [math, math]", "drafts.topics: a topic is named twice"),
        ("drafts:\n  topics: ['off']", "drafts.topics: 'off' cannot be"),
        ("drafts:\n  topics: ['a@0']", "drafts.topics: 'a@0' cannot be"),
        ("drafts:\n  topics: [suffix]", "drafts.topics: 'suffix' cannot be"),
        ("drafts:\n  topics: [mixed]", "drafts.topics: 'mixed' cannot be"),
        ("drafts:\n  paths: {poetry: x}", "drafts: paths names 'poetry'"),
        ("drafts:\n  placement: pol", "drafts.placement: "),
        ("drafts:\n  placment: pool", "drafts.placment: no such key; did you mean placement?"),
        ("drafts:\n  round_timeout_ms: 0", "drafts.round_timeout_ms: "),
        ("drafts:\n  round_timeout_ms: soon", "drafts.round_timeout_ms: "),
        ("drafts:\n  draft_ahead: maybe", "drafts.draft_ahead: "),
        ("drafts:\n  num_gpus: 2", "drafts.num_gpus: "),
        (
            "router:\n  min_confidence: 1.5",
            "router.min_confidence: input should be 'auto', or input should be less than or equal",
        ),
        (
            "training:\n  micro_batch: 0\nrouter:\n  min_confidence: 2",
            "less than or equal to 1 (and 1 more)",
        ),
        ("training:\n  micro_batch: 0", "micro_batch: input should be 'auto', or input"),
        ("replay:\n  held_out_fraction: .nan", "replay.held_out_fraction: "),
        ("[1, 2]", "must be a mapping"),
        ("port: 1\nauth: {}\nport: 2", "port is given twice in the mapping of line 1"),
        ("target:\n  dtype: auto\n  dtype: auto", "dtype is given twice in the mapping of line 2"),
        ("[" * 3000, "not YAML"),
        ("model_name: 2024-13-01", "not YAML"),
        ("target:\n  device: gpu", "target.device: 'gpu' is none of auto, cpu, cuda"),
        ("target:\n  device: cuda:1", "none of auto, cpu, cuda; CUDA_VISIBLE_DEVICES chooses"),
        (
            "target:\n  failover_timeout_s: 5\n  stall_timeout_s: 5",
            "target: failover_timeout_s (5) must be more than stall_timeout_s (5)",
        ),
        ("target:\n  prefix_cache: tenant", "target.prefix_cache: input should be"),
        ("auth:\n  keys: {acme: {sha256: secret}}", "auth.keys.acme.sha256: "),
        ("auth:\n  keys: {Acme: {sha256: %s}}" % ("a" * 64), "auth.keys: 'Acme' cannot be"),
        (
            "auth:\n  keys: {a: {sha256: %s}, b: {sha256: %s}}" % (("a" * 64,) * 2),
            "auth.keys: two keys have the same sha256",
        ),
        ("replay:\n  scope: key", "replay.scope key needs names in auth.keys"),
        ("replay:\n  scope: tenant", "replay.scope: "),
        ("replay:\n  enabled: false", "replay.enabled false leaves nothing to train on"),
        (f"{SCOPED}drafts:\n  placement: pool", "needs drafts.placement colocated"),
        (
            f"{SCOPED}drafts:\n  topics: [{', '.join(f't{n}' for n in range(16))}]",
            "makes 34 experts, one per key and topic, and at most 32",
        ),
        ("a: [", "not YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a UTF-8 text"):
        load_config(tmp_path / "binary.yaml")


def test_a_section_without_keys_is_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "commented.yaml"
    file.write_text("target:\n  # dtype: float32\ndrafts: {general: none}\ntraining:\nplacement:\n")
    assert load_config(file) == load_config(None, {"drafts.general": "none"})


def test_an_override_of_a_key_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"target\.dtyp: no such key"):
        load_config(None, {"target.dtyp": "auto"})


def test_the_shipped_config_lists_every_key_with_its_default() -> None:
    file = MODELS_DIR.parent / "config" / "default.yaml"
    assert load_config(file) == load_config()

    def keys(section: dict[str, object]) -> set[str]:
        own = set(section)
        for name, value in section.items():
            if isinstance(value, dict):
                own |= {f"{name}.{inner}" for inner in keys(value)}
        return own

    shipped = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert keys(shipped) == keys(load_config().model_dump())


def test_the_pool_is_configured_in_words_and_in_yamls_switches(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text("drafts: {placement: pool, round_timeout_ms: 20, draft_ahead: off}\n")
    drafts = load_config(file).drafts
    assert (drafts.placement, drafts.round_timeout_ms, drafts.draft_ahead) == ("pool", 20.0, "off")
    assert load_config().drafts.placement == "colocated"


def test_what_training_minimises_reaches_trainer_shards_and_target(tmp_path: Path) -> None:
    from paceline.deploy.config.learning_settings import replay_settings, trainer_settings
    from paceline.deploy.config.replica_settings import target_settings

    plain = load_config(None, {"state_dir": str(tmp_path)})
    assert trainer_settings(plain).distiller.objective.sampling == "target"
    assert not trainer_settings(plain).report_losses
    assert not target_settings(plain).replay_branches
    chosen = {"loss": "lk_hybrid", "sampling": "mixed", "student_share": 0.3, "jsd_beta": 0.2}
    keys = {f"training.{key}": value for key, value in chosen.items()}
    config = load_config(None, keys | {"replay.sampler": "priority", "state_dir": str(tmp_path)})
    objective = trainer_settings(config).distiller.objective
    assert {key: getattr(objective, key) for key in chosen} == chosen
    assert trainer_settings(config).report_losses
    assert replay_settings(config).sampler == "priority"
    assert target_settings(config).replay_branches
    off = load_config(None, keys | {"training.enabled": False})
    assert not target_settings(off).replay_branches  # no draft learns from them


def test_the_least_gain_reaches_the_gate(tmp_path: Path) -> None:
    from paceline.actors.training.gate import GateSettings
    from paceline.actors.training.topic_schedule import ScheduleSettings
    from paceline.deploy.config.learning_settings import trainer_settings

    plain = load_config(None, {"state_dir": str(tmp_path)})
    assert trainer_settings(plain).gate == GateSettings()
    assert trainer_settings(plain).schedule == ScheduleSettings()
    config = load_config(None, {"training.min_gain": 0.002, "state_dir": str(tmp_path)})
    assert trainer_settings(config).gate == GateSettings(min_gain=0.002)
    hope = trainer_settings(config).schedule.least_hope  # what may pass is no reason to rest
    assert 0.002 < hope <= 0.003


@pytest.mark.parametrize(
    ("chosen", "device", "batches"),
    [
        ({}, "cpu", (1, 8)),
        ({}, "cuda", (4, 2)),
        ({"ranks": 3}, "cpu", (3, 3)),
        ({"ranks": 2}, "cpu", (2, 4)),
        ({"micro_batch": 4}, "cpu", (4, 2)),
        ({"micro_batch": 16}, "cuda", (16, 1)),
        ({"accumulation": 3}, "cpu", (1, 3)),
    ],
)
def test_a_step_learns_from_eight_records_in_parts_that_fit_the_device(
    chosen: dict[str, int], device: str, batches: tuple[int, int]
) -> None:
    assert TrainingConfig(**chosen).batches(device) == batches


def test_without_drafts_there_is_no_pool() -> None:
    from paceline.deploy.config.replica_settings import target_settings

    pool = load_config(None, {"drafts.placement": "pool"})
    none = load_config(None, {"drafts.placement": "pool", "drafts.general": "none"})
    assert target_settings(pool).placement == "pool"
    for config in (none, pool.without_drafts()):
        assert target_settings(config).placement == "colocated"


def test_a_process_may_take_as_much_of_a_gpu_s_memory_as_it_books() -> None:
    from paceline.deploy.config.replica_settings import expert_settings, target_settings

    pool = load_config(None, {"drafts.placement": "pool", "drafts.num_gpus": 0.2})
    target = target_settings(pool, 0.4)
    assert target.gpu_share == 0.4
    assert target_settings(pool, 2.0).gpu_share == 1.0  # it uses the first
    assert expert_settings(pool, target, "sql").gpu_share == 0.2


def test_without_drafts_nothing_is_routed_or_trained() -> None:
    config = load_config(None, {"drafts.general": "none"})
    assert config.drafts.experts == ()
    assert config.draft_paths == {}
    assert not config.router.enabled
    assert not config.training.enabled
    for key, value in (
        ("drafts.topics", ["sql"]),
        ("router.enabled", True),
        ("training.enabled", True),
    ):
        with pytest.raises(ConfigError, match="drafts"):
            load_config(None, {"drafts.general": "none", key: value})


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", ""])
def test_what_is_no_origin_is_named(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"ingress\.cors_origins"):
        load_config(None, {"ingress.cors_origins": [origin]})
    origins = ["*", "http://localhost:3000"]
    assert (
        load_config(None, {"ingress.cors_origins": origins}).ingress.cors_origins[1] == origins[1]
    )
