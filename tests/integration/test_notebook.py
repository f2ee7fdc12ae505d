"""The Python API in a real notebook kernel: functions of a cell, a running event loop, progress in the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning"),
]

DEFINE = """
import tutelage

def short(answer):
    return 1.0 / (1 + len(answer.text))
"""
TRAIN = """
run = tutelage.grpo(
    "student", short, [{"prompt": "a"}, {"prompt": "b"}], heldout=["c"], steps=2, prompts_per_step=2, seed=1,
    rollout={"max_tokens": 4, "samples": 2}, validation={"max_tokens": 4}, data={"template": "none"},
)
len(run.metrics), run.metrics.to_pandas().shape[0]
"""
AGAIN = """
def short(answer):
    return float(len(answer.text))

run = run.resume(more_steps=1, reward=short)
[row["step"] for row in run.metrics], max(row["reward"] for row in run.metrics) > 1
"""


class Recorder(NotebookClient):
    """Keeps the HTML that cells display and update."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.shown: list[str] = []
        super().__init__(*args, **options)

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append(str(msg["content"]["data"].get("text/html", "")))
        return super().process_message(msg, cell, cell_index)


def executed(directory: Path, *cells: str) -> tuple[Recorder, list[str]]:
    """Run cells in a kernel of their own; return the client and the values of the cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = Recorder(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(directory)}})
    client.execute()
    values = [
        o.data["text/plain"] for cell in notebook.cells for o in cell.outputs if o.output_type == "execute_result"
    ]
    return client, values


def test_a_notebook_trains_with_the_functions_of_its_cells(tmp_path: Path) -> None:
    tiny.save(tmp_path / "student", seed=1)
    client, values = executed(tmp_path, DEFINE, TRAIN, AGAIN)
    assert values == ["(2, 2)", "([1, 2, 3], True)"], "a cell that is run again has its new function"
    bars = [html for html in client.shown if "<progress" in html]
    assert 'max="2"' in bars[0]
    assert any('max="3"' in html for html in bars), "a resumed run has a bar of its own"
    assert client.shown[-1] == "" or "<progress" not in client.shown[-1], "the bar goes when the run ends"
    text = "".join(client.shown)
    assert "step 2/2" in text
    assert "Held-out prompts, before and after" in text


def test_a_mistake_is_one_error_in_the_cell(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="learning_rate"):
        executed(tmp_path, DEFINE, TRAIN.replace("seed=1", "learning_rate=1e-5"))
