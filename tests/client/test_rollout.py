"""A rollout's forest: its branches, what is trained on, and its steps, against plain computations over lists."""

import random

import numpy as np
import pytest
from gradwire.rl.rows import rows_of
from gradwire.rollout import Rollout, Turn


class Forest:
    """Calls of an agent as plain lists: each has its whole prompt."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self.turns: list[Turn] = []

    def call(self, prompt: list[int], answer: list[int], **about: object) -> int:
        """Add a call, with the parent that shares the most tokens, as the server does."""
        number = len(self.turns)
        parent, shared = -1, 0
        for other, (before, said) in enumerate(zip(self.prompts, self.answers)):
            common = 0
            for mine, theirs in zip(prompt, [*before, *said]):
                if mine != theirs:
                    break
                common += 1
            if common > shared:
                parent, shared = other, common
        whole = parent >= 0 and shared == len(self.prompts[parent]) + len(self.answers[parent])
        fields: dict[str, object] = {"fork": "" if whole or parent < 0 else "edit", **about}
        self.prompts.append(prompt)
        self.answers.append(answer)
        suffix = np.array(prompt[shared:], np.int64)
        logprobs = np.array([-(number + 1) - place / 100 for place in range(len(answer))], np.float32)
        versions = np.full(len(answer), number % 3, np.int64)
        self.turns.append(
            Turn(number, suffix, np.array(answer, np.int64), logprobs, versions, parent, shared, **fields)  # type: ignore[arg-type]
        )
        return number

    def whole(self, number: int) -> list[int]:
        return [*self.prompts[number], *self.answers[number]]

    def rollout(self, **options: object) -> Rollout:
        return Rollout("s", self.turns, **options)  # type: ignore[arg-type]


def random_forest(seed: int) -> Forest:
    """Conversations that go on, are edited, compacted, asked again, and side calls."""
    rng = random.Random(seed)
    forest = Forest()

    def new(count: int) -> list[int]:
        return [rng.randrange(50) for _ in range(count)]

    for _ in range(rng.randrange(1, 14)):
        if not forest.turns or rng.random() < 0.15:
            prompt, system = new(rng.randrange(1, 6)), rng.choice(["a", "a", "b"])
        else:
            parent = rng.randrange(len(forest.turns))
            before, system = forest.whole(parent), forest.turns[parent].system_digest
            kept = len(before) if rng.random() < 0.7 else rng.randrange(len(before) + 1)
            prompt = before[:kept] + new(rng.randrange(1, 4))
        used = rng.random() < 0.9
        forest.call(prompt, new(rng.randrange(1, 5)), system_digest=system, used=used)
    return forest


@pytest.mark.parametrize("seed", range(60))
def test_branches_hold_every_call_with_its_own_tokens_and_mark_each_answer_once(seed: int) -> None:
    forest = random_forest(seed)
    marked: list[int] = []
    for branch in forest.rollout(main="all").branches:
        mask = np.zeros(len(branch.ids), bool)
        for turn, start in zip(branch.turns, branch.starts):
            assert branch.ids[:start].tolist() == forest.prompts[turn.number]
            assert branch.ids[start : start + len(turn.response_ids)].tolist() == forest.answers[turn.number]
            if turn in branch.own:
                mask[start : start + len(turn.response_ids)] = True
                marked.append(turn.number)
        assert branch.sampled.tolist() == mask.tolist()
        assert (branch.versions >= 0).tolist() == mask.tolist()
        assert branch.logprobs[mask].tolist() == np.concatenate([turn.logprobs for turn in branch.own]).tolist()
    assert sorted(marked) == list(range(len(forest.turns)))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("main", ["all", "longest", {"system": "a"}])
def test_rows_train_on_each_used_answer_of_main_branches_once_in_its_own_context(seed: int, main: str) -> None:
    forest = random_forest(seed)
    rollout = forest.rollout(main=main)
    ends = [
        number for number in range(len(forest.turns))
        if not any(prompt[: len(forest.whole(number))] == forest.whole(number) for prompt in forest.prompts)
    ]  # fmt: skip
    longest = max(ends, key=lambda number: (len(forest.whole(number)), -number))
    system = {"all": None, "longest": forest.turns[longest].system_digest}.get(str(main), "a")
    wanted = set()
    for end in ends:
        if system is not None and forest.turns[end].system_digest != system:
            continue
        for number in range(end + 1):  # the calls whose prompt and answer this conversation begins with
            if forest.whole(end)[: len(forest.whole(number))] == forest.whole(number) and forest.turns[number].used:
                wanted.add(number)
    trajectory = rollout.to_trajectory()
    learned: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    rows = rows_of([trajectory])
    for row in rows:
        for step in row.ends:
            there = np.flatnonzero(row.step_of == step)
            learned.append((tuple(row.ids[: there[0]].tolist()), tuple(row.ids[there].tolist())))
    expected = [(tuple(forest.prompts[number]), tuple(forest.answers[number])) for number in sorted(wanted)]
    assert sorted(learned) == sorted(expected)
    assert sum(branch.trained.sum() for branch in rollout.branches) == sum(len(answer) for _, answer in expected)


def conversation() -> Forest:
    """A task of two tool calls with a title call, an answer that was asked for again, and a compaction."""
    forest = Forest()
    main = {"system_digest": "agent", "tool_names": ("read", "edit")}
    forest.call([9, 9, 1], [21, 22], **main)  # 0
    forest.call([8, 1], [31], system_digest="title")  # 1
    forest.call([9, 9, 1, 21, 22, 2], [23], used=False, **main)  # 2: cut off
    forest.call([9, 9, 1, 21, 22, 2], [24, 25], **main)  # 3: asked again
    forest.call([9, 9, 7], [26], fork="compaction", **main)  # 4: the head, then a summary
    forest.call([9, 9, 7, 26, 3], [27], **main)  # 5
    return forest


def test_a_compacted_conversation_is_two_main_branches_and_the_title_is_a_side_call() -> None:
    rollout = conversation().rollout()
    assert [[turn.number for turn in branch.turns] for branch in rollout.branches] == [[1], [0, 2], [0, 3], [4, 5]]
    assert [branch.main for branch in rollout.branches] == [False, True, True, True]
    assert [[turn.number for turn in branch.own] for branch in rollout.branches] == [[1], [2], [0, 3], [4, 5]]
    assert [branch.trained.sum() for branch in rollout.branches] == [0, 0, 4, 2]
    assert [(branch.forked_from, branch.reason) for branch in rollout.branches[2:]] == [(-1, ""), (0, "compaction")]
    trajectory = rollout.to_trajectory()
    assert [step.response_ids.tolist() for step in trajectory.steps] == [[21, 22], [24, 25], [26], [27]]
    assert [row.ids.tolist() for row in rows_of([trajectory])] == [[9, 9, 1, 21, 22, 2, 24, 25], [9, 9, 7, 26, 3, 27]]


def test_the_main_branches_are_chosen_by_system_prompt_tools_or_a_function() -> None:
    forest = conversation()

    def main(rule: object) -> list[bool]:
        return [branch.main for branch in forest.rollout(main=rule).branches]

    assert main({"system": "title"}) == [True, False, False, False]
    assert main({"tools": ["edit"]}) == [False, True, True, True]
    assert main(lambda branch: branch.reason == "compaction") == [False, False, False, True]
    assert main("all") == [True] * 4
    with pytest.raises(ValueError, match="main must be"):
        main("shortest")
    with pytest.raises(ValueError, match="main must be"):
        main({"model": "x"})


def test_rewards_of_the_rollout_of_branches_and_of_turns() -> None:
    rollout = conversation().rollout(reward=1.0)
    trajectory = rollout.to_trajectory(group=3, member=2)
    assert (trajectory.group, trajectory.member, trajectory.reward) == (3, 2, 1.0)
    assert [step.reward for step in trajectory.steps] == [0, 0, 0, 1.0]

    rollout = conversation().rollout(turn_rewards={0: 0.5}, branch_rewards={2: 0.25, 3: 2.0})
    trajectory = rollout.to_trajectory()
    assert trajectory.reward == 2.75
    assert [step.reward for step in trajectory.steps] == [0.5, 0.25, 0, 2.0]
    with pytest.raises(ValueError, match=r"turn 2 .* not trained on"):
        conversation().rollout(turn_rewards={2: 1.0}).to_trajectory()
    with pytest.raises(ValueError, match=r"turn 1 .* not trained on"):
        conversation().rollout(branch_rewards={0: 1.0}).to_trajectory()


def test_the_task_of_a_session_may_be_anything() -> None:
    for task, prompt, data in (
        ("say", "say", {}),
        ({"prompt": "say", "level": 2}, "say", {"level": 2}),
        ({"file": "a.py"}, "", {"task": {"file": "a.py"}}),
        (None, "", {"task": None}),
    ):
        found = conversation().rollout(task=task).to_trajectory().task
        assert (found.prompt, found.data) == (prompt, data)


def test_a_turn_that_shares_more_than_its_parent_has_is_an_error() -> None:
    first, second = (np.array(ids, np.int64) for ids in ([1, 2], [3]))
    logprobs, versions = np.zeros(1, np.float32), np.zeros(1, np.int64)
    turns = [Turn(0, first, second, logprobs, versions), Turn(1, first, second, logprobs, versions, 0, 9, "edit")]
    with pytest.raises(ValueError, match="shares 9 tokens with turn 0, which has 3"):
        _ = Rollout("s", turns).branches
