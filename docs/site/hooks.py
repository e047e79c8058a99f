"""What mkdocs does beside reading docs/ (mkdocs.yml names it): more pages, links, and checks that warn.

Pages at the root of the repository, README.md as the landing page, and the reference, whose text is the docstrings,
become pages of the site. `make site` ends at the first warning.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site.links import ROOT_PAGES, site_links
from docs.site.reference import REFERENCE, reference_page

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ("h1", "h2", "h3", "li", "table", "tr", "pre", "a href", "img")
"""The elements of which a page must have as many on the site as where its file is read (CommonMark with tables)."""
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
log = logging.getLogger("mkdocs.hooks.megamem")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for path, uri in ROOT_PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            text = f"# {path.capitalize()}\n\n```text\n{text}\n```\n"
        files.append(File.generated(config, uri, content=text))
    for uri, page in REFERENCE.items():
        files.append(File.generated(config, uri, content=reference_page(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where things stand on the site."""
    return markdown if page.file.src_uri in REFERENCE else site_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of a page that the site does not show as it reads elsewhere: its Markdown is another dialect."""
    if page.file.src_uri not in REFERENCE:
        elsewhere = MarkdownIt("commonmark").enable("table").render(page.markdown or "")
        for element in COUNTED:
            here, there = (len(re.findall(rf"<{element}\b", text)) for text in (html, elsewhere))
            if here != there:
                log.warning(f"{page.file.src_uri}: {here} times <{element}> on the site, {there} times in the file")
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of a page that would fetch something from the network when it is opened."""
    for tag in FETCHED.findall(output):
        log.warning(f"{page.file.src_uri}: fetches from the network: {tag}")
    return output
