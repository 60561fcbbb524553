"""The fleet in a Ray cluster: an actor that keeps the engines where the plan wants them, and an actor for each agent.

All are detached, so they outlive the command that started them. Each agent's actor is alone in a placement group on one
node. An agent that ends is started again by Ray; one whose node is gone, by :class:`Fleet` on another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradwire.fleet.placing import place
from gradwire.fleet.plan import Plan

log = logging.getLogger(__name__)

REFUSED = "refused"
"""Beginning of the state of an agent that ended for good."""
FOR_GOOD = 2
"""Exit code of an agent that the server refuses for good, or whose options are wrong: starting it again is no use."""
KEPT_LINES = 20


class RunningAgent:
    """An agent's process; the process of this object ends with it, so that Ray starts both again.

    Args:
        arguments: Arguments of the program `gradwire`.
        key: The API key, of the role "engine"; none for a server without keys.
    """

    def __init__(self, arguments: Sequence[str], key: str) -> None:
        environment = os.environ | {"COLUMNS": "1000"} | ({"GRADWIRE_API_KEY": key} if key else {})
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gradwire_server.cli", *arguments],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)
        if self._process.wait() != FOR_GOOD:
            os._exit(1)

    def state(self) -> str:
        """ "running", or why it is not."""
        code = self._process.poll()
        words = (line.strip("│ ") for line in reversed(self._said) if any(map(str.isalnum, line)))
        return "running" if code is None else f"{REFUSED}: {next(words, f'exit code {code}')}"

    def pid(self) -> int:
        """The agent's process."""
        return self._process.pid


NAMESPACE = "gradwire"
FLEET = "gradwire-fleet"
LOOK_S = 2.0
"""Seconds between two looks at the cluster's nodes."""
ANSWER_S = 2.0
KNOWN = b"gradwire-fleet"
"""Key in Ray's own store with what a fleet's actor knows, for when it is started again."""
NODE_LABEL = "ray.io/node-id"


class Fleet:
    """Keeps a fleet's engines where the plan wants them.

    Args:
        plan: JSON of the :class:`.Plan`.
        key: The agents' API key.
    """

    def __init__(self, plan: str, key: str) -> None:
        self._plan, self._key = Plan.model_validate_json(plan), key
        known = json.loads(internal_kv._internal_kv_get(KNOWN) or b"{}")
        self._drained: set[str] = set(known.get("drained", ()))
        self._placed: dict[str, str] = known.get("placed", {})
        self._lock = threading.Lock()
        self._follows = True
        threading.Thread(target=self._follow, daemon=True).start()

    def apply(self, plan: str, key: str) -> None:
        """Take another plan.

        Engines that are in both stay, with the options that they were started with, unless they were refused or the
        server is another one.
        """
        with self._lock:
            before, self._plan, self._key = self._plan, Plan.model_validate_json(plan), key
            for engine in list(self._placed):
                if self._plan.front != before.front or _state(engine).startswith(REFUSED):
                    self._end(engine)
            self._keep()

    def plan(self) -> str:
        """The plan."""
        return self._plan.model_dump_json()

    def drain(self, node: str, undo: bool) -> None:
        """Have no engines on a node, or have them there again."""
        with self._lock:
            (self._drained.discard if undo else self._drained.add)(node)
            self._note()
            self._keep()

    def status(self) -> list[dict[str, Any]]:
        """Each engine with its node and state, and each drained node."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        engines = [
            {"engine": engine, "node": node, "host": alive.get(node, {}).get("NodeManagerHostname", ""),
             "state": _state(engine)}
            for engine, node in sorted(self._placed.items())
        ]  # fmt: skip
        wanted = [
            f"{group.name}-{number}"
            for group in self._plan.groups
            for number in range(group.engines if group.engines != "all" else 0)
        ]
        absent = [engine for engine in wanted if engine not in self._placed]
        engines += [{"engine": each, "node": "", "host": "", "state": "no node has room for it"} for each in absent]
        drained = [{"engine": "", "node": node, "host": "", "state": "drained"} for node in sorted(self._drained)]
        return engines + drained

    def down(self) -> None:
        """End all engines."""
        with self._lock:
            self._follows = False
            for engine in self._placed:
                _end(engine)
            self._placed = {}
            internal_kv._internal_kv_del(KNOWN)

    def _note(self) -> None:
        known = {"drained": sorted(self._drained), "placed": self._placed}
        internal_kv._internal_kv_put(KNOWN, json.dumps(known).encode())

    def _follow(self) -> None:
        while True:
            with self._lock:
                if not self._follows:
                    return
                try:
                    self._keep()
                except Exception:  # the cluster may answer again at the next look
                    log.exception("the fleet could not be looked after")
            time.sleep(LOOK_S)

    def _keep(self) -> None:
        nodes = {
            node["NodeID"]: node["Resources"]
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in self._drained
        }
        wanted = place(self._plan, nodes, self._placed)
        for engine, node in list(self._placed.items()):
            if wanted.get(engine) != node:
                self._end(engine)
        for engine, node in wanted.items():
            if engine not in self._placed:
                self._placed[engine] = node
                self._note()  # first, so that an actor that is started again ends it rather than not know of it
                self._begin(engine, node)

    def _end(self, engine: str) -> None:
        _end(engine)
        del self._placed[engine]
        self._note()

    def _begin(self, engine: str, node: str) -> None:
        group = self._plan.group_of(engine)
        assert group is not None
        place_of = placement_group(
            [group.bundle],
            strategy="STRICT_PACK",
            name=engine,
            lifetime="detached",
            bundle_label_selector=[{NODE_LABEL: node}],
        )
        actor = ray.remote(RunningAgent).options(
            name=engine,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=group.cpus,
            num_gpus=group.gpus,
            resources=dict(group.resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(place_of, 0),
        )
        actor.remote(self._plan.command(engine), self._key)


def fleet() -> Any:
    """The actor of the cluster's fleet; None if there is none."""
    try:
        return ray.get_actor(FLEET, NAMESPACE)
    except ValueError:
        return None


def start_fleet(plan: Plan, key: str) -> Any:
    """Start a fleet, or give the one that there is another plan."""
    known = fleet()
    if known is not None:
        ray.get(known.apply.remote(plan.model_dump_json(), key))
        return known
    options = {"name": FLEET, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    started = ray.remote(Fleet).options(**options, max_concurrency=4).remote(plan.model_dump_json(), key)
    ray.get(started.plan.remote())
    return started


def end_fleet(known: Any) -> None:
    """End a fleet and its engines."""
    ray.get(known.down.remote())
    ray.kill(known)


def _state(engine: str) -> str:
    try:
        return str(ray.get(ray.get_actor(engine, NAMESPACE).state.remote(), timeout=ANSWER_S))
    except ray.exceptions.GetTimeoutError:
        return "starting"
    except (ValueError, ray.exceptions.RayError):
        return "restarting"


def _end(engine: str) -> None:
    """End an engine's actor, and give back what it took of its node."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(ray.get_actor(engine, NAMESPACE))
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        remove_placement_group(get_placement_group(engine))
