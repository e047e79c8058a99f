"""The report of a study: records, tables and laws as data, as text, as pictures and as a page."""

from __future__ import annotations

from pathlib import Path

from megamem.files import write_bytes, write_json
from megamem.study.collect import records, write_table
from megamem.study.config import StudyConfig
from megamem.study.curves import curve_plots
from megamem.study.grid import planned_runs, study_folder
from megamem.study.laws.fitted import fitted_laws
from megamem.study.page import Section, page
from megamem.study.plots import draw_png
from megamem.study.status import run_statuses
from megamem.study.tables import as_json, cells, filled, markdown, plots

TABLES, RECORDS, PAGE = "tables.md", "records.json", "report.html"


def write_report(study: StudyConfig) -> tuple[str, Path]:
    """Write the report of what has finished so far.

    Returns: tables and laws in markdown, and the study's folder. Raises: ConfigError as `places`.
    """
    folder, runs = study_folder(study), planned_runs(study)
    folder.mkdir(parents=True, exist_ok=True)
    found, statuses = records(study, runs), run_statuses(study, runs)
    rows, table_data, law_data = [record.row for record in found], list[dict[str, object]](), list[dict[str, object]]()
    # records first: they stay if a table or a law fails
    write_json(folder / RECORDS, {"records": rows, "tables": [], "laws": []})
    write_table(study, found, folder)
    texts, tables, laws = [], [], []
    for table in study.tables:
        if known := cells(study, table, statuses, found):
            words = filled(study, table, known)
            texts.append(markdown(table, words))
            table_data.append(as_json(table, known))
            tables.append(Section(table.title, words.heads, words.rows, [words.note], plots(study, table, known)))
    for law in fitted_laws(study, runs, found):
        texts.append(law.markdown())
        law_data.append({"name": law.config.name, "fitted": law.data, "notes": law.notes})
        laws.append(Section(law.config.title, law.heads, law.rows, law.notes, law.plots))
    curves = curve_plots(study, runs)
    for plot in [*(plot for section in (*tables, *laws) for plot in section.plots), *curves]:
        draw_png(plot, folder / f"{plot.name}.png")
    text = "\n".join(texts)
    write_bytes(folder / TABLES, text.encode())
    write_json(folder / RECORDS, {"records": rows, "tables": table_data, "laws": law_data})
    write_bytes(folder / PAGE, page(study, tables, laws, curves, statuses, found).encode())
    return text, folder
