"""Comparison of what clients saw and the engine did with a sequential server: each acknowledged operation exactly once,
in order, with the result that it would have had there."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

Outcome = tuple[str, float]
"""``("ok", value)``, or the error's name and 0."""
CANCELLED: Outcome = ("OperationCancelledError", 0.0)


def ident(operation: pb.Operation) -> str:
    """Return a unique name of an operation, made from the number that it carries."""
    kind = operation.WhichOneof("kind")
    if kind == "optim_step":
        return f"step {operation.optim_step.learning_rate:g}"
    if kind == "save_checkpoint":
        return f"save {operation.save_checkpoint.note}"
    return f"{kind} {getattr(operation, kind or '').loss_fn}"


@dataclass
class RunLog:
    """Everything observed of one run.

    Attributes:
        sent: Headers that clients wrote, by number and operation; the last one, if a client sent it again.
        epochs: The epochs with which a client sent an operation, by its name.
        acknowledged: Operations that a client was told are accepted, by number.
        executed: The operation that an engine carried out last under a number. An engine may begin what is not on disk
            yet. If the disk then refuses it, or loses it, another operation takes the number, and need not be executed.
        outcomes: What futures said, by number.
        refused: Operations whose future said that they were not accepted.
        cancelling: Operations that a client asked to cancel.
    """

    sent: dict[int, dict[str, pb.OperationHeader]] = field(default_factory=lambda: defaultdict(dict))
    epochs: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    acknowledged: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    executed: dict[int, str] = field(default_factory=dict)
    outcomes: dict[int, set[Outcome]] = field(default_factory=lambda: defaultdict(set))
    refused: set[str] = field(default_factory=set)
    cancelling: set[str] = field(default_factory=set)


def check(log: RunLog, accepted: int, applied: int, trimmed: int, history: list[str]) -> list[str]:
    """Return the defects of a run as sentences; none if it is correct.

    Args:
        log: What was observed.
        accepted: The number of the last operation that the server says it accepted.
        applied: The number of the last operation up to which it has results.
        trimmed: Up to this number the server need not know whose an operation was.
        history: The state of the run: the operations that changed it.
    """
    wrong = []
    if applied != accepted:
        wrong.append(f"{accepted} operations were accepted, {applied} have results")
    if beyond := [number for number in (*log.acknowledged, *log.executed, *log.outcomes) if number > accepted]:
        wrong.append(f"the server forgot operation {min(beyond)}: it has {accepted}")
    choices: dict[int, list[str]] = {}
    for number in range(1, accepted + 1):
        told, done = log.acknowledged[number], {log.executed[number]} if number in log.executed else set()
        sent = done | set(log.sent[number])
        choices[number] = sorted(told or (sent - log.refused if number > trimmed else sent) or sent)
        choices[number].sort(key=lambda name: name not in done)
        if len(told) > 1:
            wrong.append(f"number {number} stands for several operations: {sorted(told)}")
        if not choices[number]:
            wrong.append(f"nobody sent operation {number}")
            choices[number] = [""]
    numbers = Counter(name for number, name in log.executed.items() if number <= accepted)
    wrong += [f"{name} was carried out under several numbers" for name, count in numbers.items() if count > 1]
    possible = (
        _differences(log, each, trimmed, history, cancelled)
        for each in _contents(log, choices)
        for cancelled in _cancellations(log, each)
    )
    return wrong + _fewest(possible)


def _contents(log: RunLog, choices: dict[int, list[str]]) -> Iterator[dict[int, str]]:
    """Return what the numbers may stand for, the executed operations first.

    Writers took the run from each other, and some were killed before they knew whose operation had been accepted. An
    older writer submits nothing after a newer one: along the numbers, epochs do not fall.
    """

    def follow(number: int, epoch: int, content: dict[int, str]) -> Iterator[dict[int, str]]:
        if number not in choices:
            yield dict(content)
            return
        for name in choices[number]:
            later = [each for each in log.epochs[name] if each >= epoch]
            if later or not log.epochs[name]:
                content[number] = name
                yield from follow(number + 1, min(later, default=epoch), content)

    return follow(1, 0, {})


def _fewest(possible: Iterator[list[str]]) -> list[str]:
    """Return the shortest list of differences; the first empty one ends the search."""
    fewest = next(possible, ["an older writer submitted after a newer one"])
    while fewest and (other := next(possible, None)) is not None:
        fewest = min(fewest, other, key=len)
    return fewest


def _cancellations(log: RunLog, content: dict[int, str]) -> Iterator[set[int]]:
    """Return the sets of operations that may have been cancelled: the outcome of some requests was never seen."""
    certain = {number for number in content if CANCELLED in log.outcomes[number]}
    open_ = [number for number, name in content.items() if name in log.cancelling and not log.outcomes[number]]
    for count in range(len(open_) + 1):
        for chosen in itertools.combinations(open_, count):
            yield certain | set(chosen)


def _differences(
    log: RunLog, content: dict[int, str], trimmed: int, history: list[str], cancelled: set[int]
) -> list[str]:
    done = {name for number, name in content.items() if number > trimmed and log.executed.get(number) == name}
    wrong = [f"refused, and carried out nevertheless: {name}" for name in sorted(log.refused & done)]
    expected, state = _sequential(log, content, cancelled)
    for number, outcomes in sorted(log.outcomes.items()):
        if differing := outcomes - {expected.get(number, ("nothing", 0.0))}:
            wrong.append(
                f"operation {number} ({content.get(number)}): {sorted(differing)} instead of {expected.get(number)}"
            )
    for number, outcome in expected.items():
        if outcome[0] == "ok" and log.executed.get(number) != content[number]:
            wrong.append(f"operation {number} is {content[number]}, carried out was {log.executed.get(number)}")
    if history != state:
        wrong.append(f"the run is {history} instead of {state}")
    return wrong


def _sequential(log: RunLog, content: dict[int, str], cancelled: set[int]) -> tuple[dict[int, Outcome], list[str]]:
    """Return the outcomes and the final state of a server that executes one operation at a time and never fails."""
    expected: dict[int, Outcome] = {}
    state: list[str] = []
    failure = 0
    for number, name in content.items():
        header = log.sent[number].get(name)
        if header is None:
            expected[number] = ("never sent", 0.0)
            continue
        kind, loss_fn = header.operation.WhichOneof("kind"), header.operation.forward_backward.loss_fn
        if number in cancelled and name in log.cancelling:
            expected[number] = CANCELLED
            continue
        if failure and header.failure_seen < failure:
            expected[number] = ("AbortedPredecessorError", 0.0)
            if kind == "optim_step":
                failure = 0
            continue
        failure = 0
        if loss_fn.startswith("fail"):
            failure, expected[number] = number, ("InvalidBatchError", 0.0)
        elif loss_fn.startswith("die"):
            failure, expected[number] = number, ("QuarantinedError", 0.0)
        elif kind == "optim_step":
            state.append("step")
            expected[number] = ("ok", float(state.count("step")))
        elif kind == "forward_backward":
            state.append(loss_fn)
            expected[number] = ("ok", float(len(state)))
        elif kind == "save_checkpoint":
            expected[number] = ("ok", float(number))
        else:
            expected[number] = ("ok", float(len(state)))
    return expected, state
