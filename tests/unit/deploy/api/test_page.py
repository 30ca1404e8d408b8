"""The page's files: whole, of this house alone, and served as browsers need them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from paceline.deploy.api.page import FOLDER, add_page

HTML = (FOLDER / "index.html").read_text(encoding="utf-8")
FILES = sorted(FOLDER.iterdir())
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def get(*paths: str, **headers: str) -> list[httpx.Response]:
    api = FastAPI()
    add_page(api)

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return [await http.get(path, headers=headers) for path in paths]

    return asyncio.run(send())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_file_comes_with_its_type_and_what_browsers_are_to_keep_to(file: Path) -> None:
    (answer,) = get(f"/ui/{file.name}")
    assert answer.status_code == 200
    assert answer.content == file.read_bytes()
    assert answer.headers["Content-Type"].split(";")[0] == TYPES[file.suffix]
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-cache"
    (again,) = get(f"/ui/{file.name}", **{"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_folder_is_the_page_and_its_name_leads_there() -> None:
    page, bare, root = get("/ui/", "/ui", "/")
    assert root.headers["Location"] == "ui/"
    assert page.text == HTML
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert (bare.status_code, bare.headers["Location"]) == (307, "ui/")


def test_nothing_else_of_the_disk_is_there() -> None:
    up = ("/ui/../page.py", "/ui/%2e%2e/page.py", "/ui/..%2fpage.py")
    assert {a.status_code for a in get(*up, "/ui//etc/passwd", "/ui/x.js")} == {404}


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_no_other_host_is_named(file: Path) -> None:
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", file.read_text(encoding="utf-8"))
    assert [a for a in addresses if a != "http://www.w3.org"] == []  # SVG's name, never fetched


def test_nothing_is_in_line_and_all_that_is_named_exists() -> None:
    assert re.findall(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=", HTML) == []
    named = re.findall(r'(?:src|href)="([^"#]+)"', HTML)
    scripts = [path for path in FILES if path.suffix == ".js"]
    for path in scripts:
        source = path.read_text(encoding="utf-8")
        assert "innerHTML" not in source
        assert "insertAdjacentHTML" not in source
        assert "eval(" not in source
        named += [name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', source)]
    names = {path.name for path in FILES}
    assert set(named) <= names
    assert names - set(named) == {"index.html"}


def test_every_field_has_a_label() -> None:
    fields = re.findall(r"<(?:input|textarea|select)\b[^>]*>", HTML)
    wrapped = re.findall(r"<label[^>]*>(?:(?!</label>).)*<(?:input|select)", HTML, re.DOTALL)
    for_id = re.findall(r'<label for="([\w-]+)"', HTML)
    assert len(fields) == len(wrapped) + len(for_id)
