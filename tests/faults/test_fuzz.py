"""Every RPC with messages that no client would send: no crash, no hang, no other run's data, a code each time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.doors.grpc.door import SERVICE
from support.access import rpcs
from support.front import Client, start
from support.fuzz import Fuzzer
from support.keyed import code_of, error_of

from tests.server.security.conftest import KeyedDoor, keyed

pytestmark = pytest.mark.long

__all__ = ["keyed", "start"]
SHORT, LONG = 600, 100_000
AT_ONCE = 20
HANGS_S = 60.0
WAITS_S = 0.05
METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["TrainingService"].methods}
LIMITS = {"max_runs": 60, "key_runs": 40}


class Attacker:
    """Bob, who has a key and some runs, and wants to know what ada has."""

    def __init__(self, door: KeyedDoor, victim: Client, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self.door, self.victim, self.channel, self.rng = door, victim, channel, rng
        self.metadata = (("authorization", f"Bearer {door.secrets['bob']}"),)
        self.fuzzer = Fuzzer(rng)
        self.results: Counter[str] = Counter()
        self.next_seq: dict[str, int] = {}
        self.own: list[Client] = []

    async def settle_in(self) -> None:
        """Gets runs of its own where it has lost them, so that what follows reaches deep."""
        alive = []
        for client in self.own:
            try:
                run = await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))
            except grpc.RpcError:
                continue
            client.epoch, self.next_seq[client.run_id] = run.epoch, run.accepted_seq + 1
            alive.append(client)
        self.own = alive
        listed = await (await self.door.client("bob")).stub.ListRuns(pb.ListRunsRequest(page_size=1000))
        for run in listed.runs[: max(0, len(listed.runs) - 30)]:
            if run.run_id not in {client.run_id for client in alive}:
                await (await self.door.client("bob")).stub.DeleteRun(pb.DeleteRunRequest(run_id=run.run_id))
        while len(self.own) < 3:
            client = await (await self.door.client("bob")).begin()
            self.own.append(client)
            self.next_seq[client.run_id] = 1
        words = [client.run_id for client in self.own] + [self.victim.run_id]
        self.fuzzer.words = [*words, *(f"{run_id}/c" for run_id in words), *(f"{run_id}/../c" for run_id in words)]

    async def attack(self) -> None:
        name = "Submit" if self.rng.random() < 0.3 else self.rng.choice(rpcs())
        method = METHODS[name]
        kind: Any = getattr(pb, method.input_type.name)
        messages = self.frames() if name == "Submit" else [self.aimed(self.fuzzer.fill(kind()))]
        raw = [message.SerializeToString() for message in messages]
        if self.rng.random() < 0.15:
            raw = [self.fuzzer.damage(data) for data in raw]
        answer: Any = getattr(pb, method.output_type.name)
        try:
            async with asyncio.timeout(HANGS_S):
                found = await self.call(name, method, raw)
        except grpc.RpcError as error:
            if name == "Submit" and error.details() == "Internal error from Core":
                self.note(name, "ended", b"", messages)  # grpc.aio's own word for a write behind the end of a stream
                return
            refused = error_of(error)
            assert refused.code and refused.message, f"{name}: {error}"
            self.note(name, code_of(refused), refused.SerializeToString(), messages)
        else:
            for data in found:
                parsed = answer.FromString(data)
                error = parsed.error if name == "Submit" else None
                code = code_of(error) if error is not None and error.code else "answered"
                self.note(name, code, data, messages)
            if not found:
                self.note(name, "waits", b"", messages)

    async def call(self, name: str, method: Any, raw: list[bytes]) -> list[bytes]:
        path = f"/{SERVICE}/{name}"
        if not method.server_streaming:
            return [await self.channel.unary_unary(path)(raw[0], metadata=self.metadata)]
        if method.client_streaming:
            stream: Any = self.channel.stream_stream(path)(metadata=self.metadata)
            try:
                for data in raw:
                    await stream.write(data)
                await stream.done_writing()
            except (grpc.RpcError, asyncio.InvalidStateError):
                pass  # it has ended; reading says why
        else:
            stream = self.channel.unary_stream(path)(raw[0], metadata=self.metadata)
        found: list[bytes] = []
        try:
            while len(found) < 3:
                data = await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(stream.read())), WAITS_S)
                if data is grpc.aio.EOF:
                    break
                found.append(data)
        except TimeoutError:
            stream.cancel()  # it stays open by right, or another is being carried out
            await asyncio.gather(reading, return_exceptions=True)
        stream.cancel()
        return found

    def note(self, name: str, code: str, data: bytes, messages: list[Any]) -> None:
        assert code != "internal", f"{name}: the server made a mistake over {messages}"
        assert b"secret-" not in data, f"{name} told something of another's: {messages}"
        assert code in ("answered", "waits") or b"Traceback" not in data
        self.results[f"{name} {code}"] += 1

    def aimed(self, message: Any) -> Any:
        """Half of the messages name a run of the attacker's own, so that they are not all refused at the door."""
        if self.rng.random() < 0.5:
            run_id = self.rng.choice(self.own).run_id
            for field in ("run_id", "checkpoint"):
                if field in message.DESCRIPTOR.fields_by_name:
                    setattr(message, field, run_id if field == "run_id" else f"{run_id}/c")
        if isinstance(message, pb.OpenRunRequest) and message.run_id in self.next_seq:
            message.takeover = False
        return message

    def frames(self) -> list[pb.SubmitFrame]:
        """Operations: most with a number that is next, some whose payload is what the header says."""
        frames = []
        for _ in range(self.rng.randrange(1, 4)):
            header = self.fuzzer.fill(pb.OperationHeader())
            client = self.rng.choice(self.own)
            payload = self.rng.randbytes(self.rng.choice((0, 0, 1, 40, 5000)))
            if self.rng.random() < 0.8:
                header.run_id, header.epoch = client.run_id, client.epoch
                header.seq = self.next_seq[client.run_id] + self.rng.choice((0, 0, 0, 0, 1, -1))
                header.failure_seen = max(header.seq - 1, 0)
                header.operation.forward_backward.loss_fn += "!"  # not one that the fake engine dies of
                if self.rng.random() < 0.5:
                    self.fuzzer.fill(header.operation)
                self.next_seq[client.run_id] = max(self.next_seq[client.run_id], header.seq + 1)
            elif self.rng.random() < 0.5:
                header.run_id, header.epoch, header.seq = self.victim.run_id, self.victim.epoch, 3
            if self.rng.random() < 0.7:
                del header.tensors[:]
                if payload and self.rng.random() < 0.8:
                    header.tensors.add(name="x", dtype=pb.DTYPE_UINT8, shape=[len(payload)])
                header.payload_bytes, header.payload_digest = len(payload), codec.digest([payload])
            if header.operation.WhichOneof("kind") == "save_checkpoint":
                header.operation.save_checkpoint.overwrite = True
            frames.append(pb.SubmitFrame(header=header, chunk=payload))
            if self.rng.random() < 0.1:
                frames.append(self.fuzzer.fill(pb.SubmitFrame(), 0.3))
        return frames


async def fuzz(keyed: Any, count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with keyed(limits=LIMITS) as door, grpc.aio.insecure_channel(door.door.server.address) as channel:
        victim = await door.shared_run()
        run = pb.GetRunRequest(run_id=victim.run_id)
        before = (await victim.stub.GetRun(run)).SerializeToString(deterministic=True)
        attacker = Attacker(door, victim, channel, random.Random(seed))
        for done in range(0, count, AT_ONCE):
            if done % (AT_ONCE * 5) == 0:
                await attacker.settle_in()
            await asyncio.gather(*(attacker.attack() for _ in range(AT_ONCE)))
        assert (await victim.stub.GetRun(run)).SerializeToString(deterministic=True) == before
        assert not (await victim.fb(3)).HasField("error")
        assert await victim.statuses(3) == ["ok"] * 3
    faults = [record for record in caplog.records if record.name.startswith("gradwire")]
    assert not faults, [record.getMessage() for record in faults][:5]
    codes = Counter[str]()
    for what, times in attacker.results.items():
        codes[what.split()[1]] += times
    tried = {what.split()[0] for what in attacker.results}
    print(f"{count} messages, seed {seed}: {dict(codes.most_common())}; nothing crashed, hung or was told")
    assert tried == set(rpcs()) and codes["answered"] > count / 20


async def test_hundreds_of_hostile_messages(keyed: Any, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    await fuzz(keyed, SHORT, seed, caplog)


@pytest.mark.faults
@pytest.mark.timeout(3600)
async def test_a_hundred_thousand_hostile_messages(keyed: Any, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    await fuzz(keyed, LONG, seed, caplog)


def hostile_payload(fuzzer: Fuzzer, rng: random.Random) -> tuple[list[pb.TensorSpec], bytes]:
    """Specs with a payload of the size that they say, where that is a size at all."""
    specs = [fuzzer.fill(pb.TensorSpec()) for _ in range(rng.randrange(3))]
    for spec in specs:
        if rng.random() < 0.9:
            del spec.shape[:], spec.level_sizes[:]
            spec.name, spec.dtype = rng.choice("abcdef"), rng.choice([1, 2, 3, 4, 5, 6])
            spec.shape.extend(rng.choice((0, 1, 2, 5)) for _ in range(rng.randrange(1, 4)))
            spec.level_sizes.extend(rng.choice((0, 1, 2, 3)) for _ in range(rng.randrange(3)))
    try:
        size = min(sum(codec.spec_bytes(spec) for spec in specs), 10_000)
    except KeyError:
        size = rng.randrange(100)
    return specs, bytes(rng.choice((0, 0, 0, 1, 2, 255)) for _ in range(size))


def test_a_payload_is_decoded_or_refused(rng: random.Random) -> None:
    fuzzer, decoded, refused = Fuzzer(rng), 0, 0
    for _ in range(5000):
        specs, payload = hostile_payload(fuzzer, rng)
        try:
            columns = codec.decode(specs, payload)
        except codec.CodecError as error:
            assert str(error)
            refused += 1
        else:
            assert sum(
                column.values.nbytes + sum(level.nbytes for level in column.levels) for column in columns.values()
            ) == len(payload)
            decoded += 1
    print(f"{decoded} payloads decoded, {refused} refused")
    assert decoded and refused
