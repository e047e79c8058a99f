"""What a study leaves in its folder: records.json, tables.md, and a picture of each table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megamem.study.config import StudyConfig
from megamem.study.grid import planned_runs, study_folder
from megamem.study.queue import records
from megamem.study.tables import as_json, cells, markdown, picture

TABLES, RECORDS = "tables.md", "records.json"


def write_report(study: StudyConfig) -> tuple[str, Path]:
    """(tables in markdown, folder), from what has finished so far. Raises ConfigError where a table does not fit."""
    folder = study_folder(study)
    folder.mkdir(parents=True, exist_ok=True)
    found = records(study, planned_runs(study))
    (folder / RECORDS).write_text(json.dumps({"records": found, "tables": []}, indent=2) + "\n", encoding="utf-8")
    parts: list[str] = []
    data: list[dict[str, Any]] = []
    for table in study.tables:
        filled = cells(study, table, found)
        if filled:
            parts.append(markdown(study, table, filled))
            data.append(as_json(study, table, filled))
            picture(study, table, filled, folder / f"{table.name}.png")
    text = "\n".join(parts)
    (folder / TABLES).write_text(text, encoding="utf-8")
    (folder / RECORDS).write_text(json.dumps({"records": found, "tables": data}, indent=2) + "\n", encoding="utf-8")
    return text, folder
