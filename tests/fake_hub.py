"""A hub in this process: the requests of `huggingface_hub` for one upload and for downloads."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import local_server
from local_server import Quiet

COMMIT = "5" * 40


@dataclass
class Hub:
    """What is stored, and who may have it."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by OWNER/NAME
    private: set[str] = field(default_factory=set)
    gated: bool = False
    url: str = ""

    def create(self, asked: dict) -> dict:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        self.repositories.setdefault(name, {})
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(name)
        return {"url": f"{self.url}/{name}", "name": name}

    def commit(self, name: str, lines: list[dict]) -> dict:
        for line in lines:
            if line["key"] == "file":
                assert line["value"]["encoding"] == "base64"
                content = base64.b64decode(line["value"]["content"])
                self.repositories[name][line["value"]["path"]] = content
        return {
            "success": True,
            "commitOid": COMMIT,
            "commitUrl": f"{self.url}/{name}/commit/{COMMIT}",
        }

    def described(self, name: str) -> dict:
        files = [{"rfilename": file} for file in self.repositories[name]]
        return {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}

    def tree(self, name: str) -> list[dict]:
        return [
            {"type": "file", "path": path, "size": len(content), "oid": digest(content)}
            for path, content in self.repositories[name].items()
        ]


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Answers(Quiet, BaseHTTPRequestHandler):
    """What a hub answers; `hub` is set in a class of its own for each."""

    hub: Hub

    def send_json(self, content: object) -> None:
        self.send(200, json.dumps(content).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/").split("/")
        name = "/".join(path[2:4] if path[0] == "api" else path[:2])
        if name not in self.hub.repositories:
            self.send(404, b"{}", X_Error_Code="RepoNotFound")
        elif self.hub.gated:
            self.send(403, b"{}", X_Error_Code="GatedRepo")
        elif path[:2] == ["api", "models"]:
            is_tree = path[4:5] == ["tree"]
            self.send_json(self.hub.tree(name) if is_tree else self.hub.described(name))
        else:  # OWNER/NAME/resolve/COMMIT/FILE
            content = self.hub.repositories[name]["/".join(path[4:])]
            self.send(200, content, ETag=f'"{digest(content)}"', X_Repo_Commit=COMMIT)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path = self.path.strip("/").split("/")
        if path == ["api", "validate-yaml"]:
            self.send_json({"errors": [], "warnings": []})
        elif path == ["api", "repos", "create"]:
            self.send_json(self.hub.create(json.loads(text)))
        elif path[4] == "preupload":
            files = json.loads(text)["files"]
            kinds = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.send_json({"files": [{"path": f["path"]} | kinds for f in files]})
        else:
            lines = [json.loads(line) for line in text.splitlines()]
            self.send_json(self.hub.commit("/".join(path[2:4]), lines))


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The hub's address while the block runs."""
    with local_server.serving(type("OfHub", (Answers,), {"hub": hub})) as hub.url:
        yield hub.url
