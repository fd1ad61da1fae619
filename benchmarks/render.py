"""Write benchmarks/RESULTS.md from the JSON files in benchmarks/results/: python benchmarks/render.py"""

import json
from typing import Any

from common.harness import FOLDER, RESULTS

HEAD = """# Results

Written by `python benchmarks/render.py` from the last run of each benchmark. Times are medians of steps, systems take
turns in one run (A B C, A B C), every run starts fresh processes, and all train the same model on the same data: the
losses are compared. Warnings name differences, and runs beside which other programs used the machine. Read the ratios:
machines differ.
"""


def section(record: dict[str, Any]) -> str:
    lines = [f"## {record['title']}", "", f"{record['date']}; {record['machine']}; `{record['command']}`", ""]
    lines += [f"**Warning:** {warning}\n" for warning in record["warnings"]]
    for table in record["tables"]:
        lines += [f"{table['caption']}:", ""]
        lines += ["| " + " | ".join(table["head"]) + " |", "|" + " --- |" * len(table["head"])]
        lines += ["| " + " | ".join(row) + " |" for row in table["rows"]]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    order = ["step", "wire", "memory", "prefetch", "host", "optimizer", "checkpoint", "quality"]
    records.sort(key=lambda record: order.index(record["name"]) if record["name"] in order else len(order))
    text = "\n".join([HEAD, *(section(record) for record in records)])
    (FOLDER / "RESULTS.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    print(f"{len(records)} benchmarks in {FOLDER / 'RESULTS.md'}")


main()
