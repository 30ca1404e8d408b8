"""One running application for every test here: tiny random models, real Ray, real HTTP."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fixture_models import ROUTER
from free_ports import find_port
from tiny_models import tiny_llama, tiny_tokenizer

from paceline.deploy.config.config import PacelineConfig, load_config

CONTEXT = 2048
# Tests read metrics: export them faster than every ten seconds.
os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")


@pytest.fixture
def free_port() -> int:
    """A port for this test alone."""
    return find_port()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny target, a draft for it, and a draft of another tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    for seed, (name, layers) in enumerate([("target", 2), ("draft", 1), ("other", 1)]):
        model = tiny_llama(
            seed, layers=layers, vocab=len(tokenizer), max_position_embeddings=CONTEXT
        )
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    file = root / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def tiny_config(
    tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> PacelineConfig:
    """The tiny models on a free port, with a state folder of their own."""
    return load_config(
        None,
        {
            "port": find_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "target.path": str(tiny_folders["target"]),
            "target.dtype": "float32",
            "target.num_threads": 1,
            "target.max_num_seqs": 4,
            "target.max_queued_requests": 12,
            "drafts.general": str(tiny_folders["draft"]),
            "router.path": str(ROUTER),
            "router.timeout_s": 10.0,
            "training.enabled": False,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )


@pytest.fixture(scope="session")
def base_url(tiny_config: PacelineConfig) -> Iterator[str]:
    """Where the application listens; started once, ended after the last test."""
    from paceline.deploy import app

    with app.start(tiny_config) as running:
        yield running.base_url


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=base_url, timeout=120, verify=False) as client:  # no TLS to set up
        yield client


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    http_client = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(
        base_url=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=http_client,
    ) as opened:
        yield opened
