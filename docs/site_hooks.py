"""Hooks of `make docs`: README.md becomes the first page, and links out of docs/ stay valid."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The text of a page as mkdocs reads it.

    Files outside docs/ are not part of the site: links to them lead to the repository if mkdocs.yml
    has a `repo_url`, and become plain text otherwise.
    """
    if page.file.src_uri == "index.md":
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        markdown = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text).replace("](docs/", "](")
    markdown = markdown.replace("](../README.md", "](index.md")

    def outside(link: re.Match[str]) -> str:
        """A link [text](../path) for the site."""
        text, path = link.groups()
        return f"[{text}]({config.repo_url}/blob/main/{path})" if config.repo_url else text

    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./([^)]*)\)", outside, markdown)
