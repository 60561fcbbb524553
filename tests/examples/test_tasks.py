"""The tasks that the examples learn from."""

from __future__ import annotations

import json
from pathlib import Path

from _support.tasks import from_files


def test_what_is_held_out_of_the_prompts_is_learned_from_in_no_file(tmp_path: Path) -> None:
    questions = [f"What is {number} and {number}?" for number in range(40)]
    problems = [{"question": each, "answer": "#### 0"} for each in questions]
    pairs = [{"prompt": each, "chosen": "a", "rejected": wrong} for each in questions for wrong in ("b", "c")]
    for name, rows in (("problems", problems), ("pairs", pairs)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    task = from_files(tmp_path / "problems", tmp_path / "pairs", tmp_path / "problems", seed=0)
    held_out = {each.prompt for each in task.held_out}
    assert len(held_out) == 10
    for learned in (task.demonstrations, task.prompts, task.preferences):
        assert learned
        assert not held_out & {each.prompt for each in learned}
    assert not {each.prompt for each in task.preferences} & {each.prompt for each in task.held_out_preferences}
    assert len(task.preferences) + len(task.held_out_preferences) == len(pairs)
