"""A store in a bucket: whole folders or none, one writer, what a network does, what a crash leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire_server.checkpoint_files import DamagedCheckpoint, StoredFile
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import Place, Store, StoreError, Superseded
from support.object_store import (
    BUCKET,
    Objects,
    azure_server,
    google_server,
    lost_answer,
    s3_server,
    silent,
    slow_read,
    torn_upload,
    unavailable,
)

pytest.importorskip("obstore", reason="needs obstore: pip install 'gradwire[store]'")

from gradwire_server.stores.bucket import PART_BYTES, Bucket
from gradwire_server.stores.cache import Cache
from gradwire_server.stores.objects import ObjectStore

PLACE = Place("runs/run-a", "checkpoints/one")
MANIFEST = "runs/run-a/manifest.json"


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Objects]:
    starts = {"s3": s3_server, "gs": google_server, "az": lambda: azure_server(tmp_path_factory.mktemp("azurite"))}
    with starts[request.param]() as objects:
        yield objects


@pytest.fixture
def bucket(server: Objects, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for key in server.objects():
        server.remove(key)
    server.faults.requests.clear()
    yield server
    server.faults.mend()


def opened(bucket: Objects, folder: Path, *, cache_bytes: int = 1 << 30, patience_s: float = 20.0) -> ObjectStore:
    """A store as one machine opens it, whose cache is in ``folder``."""
    return ObjectStore(Bucket(f"{bucket.url}/p", patience_s), Cache(folder / "cache", cache_bytes))


def write(store: Store, content: dict[str, bytes], place: Place = PLACE, fence: int = 0) -> None:
    with store.replacing(place, fence) as folder:
        for name, data in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


def read(store: Store, place: Place = PLACE) -> dict[str, bytes]:
    with store.reading(place) as folder:
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
def test_what_one_machine_writes_another_reads_in_parts(bucket: Objects, tmp_path: Path) -> None:
    here, there = opened(bucket, tmp_path / "here"), opened(bucket, tmp_path / "there")
    content = {"large": os.urandom(2 * PART_BYTES + 5), "sub/small": b"x", "empty": b""}
    write(here, content)
    assert read(there) == content and there.names("runs/run-a", "checkpoints") == ["one"] and there.has(PLACE)
    assert sum(bucket.part in path and method == "PUT" for method, path in bucket.faults.requests) == 3
    there.check(PLACE, "large", StoredFile.of(tmp_path / "there" / "cache" / _cached(tmp_path / "there") / "large"))
    bucket.faults.requests.clear()
    with there.reading(PLACE, "sub/small") as folder:
        assert (folder / "sub" / "small").read_bytes() == b"x"
    (read_again,) = {path.partition("?")[0] for _, path in bucket.faults.requests}
    assert read_again.endswith(f"/{BUCKET}/p/{MANIFEST}")  # the rest is here
    write(here, {"a": b"2"})
    assert read(there) == {"a": b"2"}  # never what the cache had under this name
    there.copy(PLACE, Place("runs/run-b", "checkpoints/origin"))
    here.delete(PLACE)
    assert not there.has(PLACE) and read(there, Place("runs/run-b", "checkpoints/origin")) == {"a": b"2"}
    with pytest.raises(FileNotFoundError), there.reading(PLACE):
        pass
    there.delete_all("runs/run-b")
    assert set(bucket.objects()) == {f"p/{MANIFEST}"}


def _cached(machine: Path) -> str:
    return next(folder.name for folder in (machine / "cache").iterdir())


@pytest.mark.parametrize("kind", ["objects", "folder"])
def test_a_writer_that_was_superseded_is_refused(kind: str, bucket: Objects, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    old, new = (
        opened(bucket, tmp_path / name) if kind == "objects" else FolderStore(shared, fenced=True)
        for name in ("old", "new")
    )
    first = old.fence("runs/run-a")
    write(old, {"a": b"first"}, fence=first)
    with pytest.raises(Superseded, match="another engine holds runs/run-a"), old.replacing(PLACE, first) as folder:
        (folder / "a").write_bytes(b"late")
        second = new.fence("runs/run-a")  # while it writes
    assert second > first and read(new) == {"a": b"first"}
    write(new, {"a": b"second"}, fence=second)
    for place in (PLACE, Place("runs/run-a", "checkpoints/of-a-new-name")):
        with pytest.raises(Superseded):
            write(old, {"a": b"late"}, place, fence=first)
    assert read(old) == {"a": b"second"} and new.names("runs/run-a", "checkpoints") == ["one"]
    assert not new.inspect({"runs/run-a"}, print)


def test_two_writers_of_a_run_at_a_time_lose_nothing(bucket: Objects, tmp_path: Path) -> None:
    places = [Place("runs/run-a", f"checkpoints/{number}") for number in range(4)]

    def work(number: int) -> None:
        store = opened(bucket, tmp_path / str(number))
        for turn in (1, 2):
            write(store, {"a": b"%d" % turn}, places[number])

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = opened(bucket, tmp_path)
    assert [read(store, place) for place in places] == [{"a": b"2"}] * 4 and not store.inspect({"runs/run-a"}, print)


def test_requests_that_fail_for_a_while_are_repeated(bucket: Objects, tmp_path: Path) -> None:
    store = opened(bucket, tmp_path / "here")
    content = {"large": os.urandom(PART_BYTES + 5), "small": b"x"}
    for method, part in (("PUT", bucket.part), bucket.whole, ("PUT", "small"), ("GET", MANIFEST)):
        bucket.faults.plan(unavailable, method, part, 2)
    bucket.faults.plan(lost_answer, "PUT", MANIFEST, 2)  # it was written, and the writer does not know
    write(store, content)
    bucket.faults.plan(torn_upload, "PUT", "small")
    write(store, content)
    for method in ("GET", "HEAD"):
        bucket.faults.plan(unavailable, method, "large", 2)
    bucket.faults.plan(slow_read, "GET", "large")
    assert read(opened(bucket, tmp_path / "there")) == content
    bucket.faults.plan(lost_answer, *bucket.deletes, 1)
    store.delete(PLACE)
    assert not bucket.faults.planned  # each happened
    assert not store.inspect({"runs/run-a"}, print)


@pytest.mark.parametrize("fault", [unavailable, silent])
def test_a_store_that_stays_away_is_named_and_leaves_what_was_there(
    bucket: Objects, tmp_path: Path, fault: object
) -> None:
    store, hasty = opened(bucket, tmp_path), opened(bucket, tmp_path / "hasty", patience_s=1)
    write(store, {"a": b"before"})
    bucket.faults.plan(fault, "PUT", "/a", -1)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=rf"{bucket.url}/p did not write runs/run-a/\w+/a within .* Nothing was lost"):
        write(hasty, {"a": b"after"})
    bucket.faults.mend()
    assert read(store) == {"a": b"before"} and not store.inspect({"runs/run-a"}, print)
    bucket.faults.plan(fault, "GET", MANIFEST, -1)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"did not read runs/run-a/manifest\.json"), hasty.reading(PLACE):
        pass


def test_after_one_long_wait_the_others_are_short_until_the_store_answers(bucket: Objects, tmp_path: Path) -> None:
    client = Bucket(f"{bucket.url}/p", 0.5)

    def requests() -> int:
        return sum(method == "PUT" for method, _ in bucket.faults.requests)

    bucket.faults.plan(unavailable, "PUT", "", -1)
    for expected in (2, 1, 1):
        before = requests()
        with pytest.raises(StoreError):
            client.put("a", b"x", None)
        assert requests() - before == expected if expected == 1 else requests() - before >= expected
    bucket.faults.mend()
    client.put("a", b"x", None)
    bucket.faults.plan(unavailable, "PUT", "", 1)
    client.put("b", b"x", None)  # waited for again


def test_what_is_not_there_any_more_is_deleted_already(bucket: Objects) -> None:
    client = Bucket(f"{bucket.url}/p", 5.0)
    for key in ("a", "b"):
        client.put(key, b"x", None)
    client.delete(["gone"])
    client.delete(["a", "gone", "b"])
    assert not bucket.objects()


def test_an_address_that_is_wrong_says_what_to_do(bucket: Objects, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1)
    with pytest.raises(StoreError, match=r"cannot write gradwire.json: .*Create the bucket, or correct the address"):
        ObjectStore(Bucket(f"{bucket.url[:2]}://another/p", 5.0), cache).identity("x")
    with pytest.raises(StoreError, match="nothing://x cannot be used"):
        Bucket("nothing://x", 5.0)


def test_torn_and_changed_objects_are_not_read(bucket: Objects, tmp_path: Path) -> None:
    store, elsewhere = opened(bucket, tmp_path / "here"), opened(bucket, tmp_path / "there")
    write(store, {"a": b"content", "b": b"content"})
    stored = StoredFile(7, "")
    [a, b] = sorted(key for key in bucket.objects() if key.endswith(("/a", "/b")))
    bucket.overwrite(a, b"c0ntent")
    with pytest.raises(DamagedCheckpoint, match="a has changed since it was saved"), elsewhere.reading(PLACE):
        pass
    with elsewhere.reading(PLACE, "b") as folder:
        assert (folder / "b").read_bytes() == b"content"
    bucket.overwrite(a, b"cont")
    with pytest.raises(DamagedCheckpoint, match="a has 4 bytes and had 7"):
        store.check(PLACE, "a", stored)  # what is here is not what it looks at
    bucket.remove(b)
    with pytest.raises(DamagedCheckpoint, match="b is missing"):
        store.check(PLACE, "b", stored)
    write(store, {"c": b"x"}, Place("runs/run-gone", "checkpoints/one"))
    bucket.overwrite("p/runs/run-a/0123/left-by-a-crash", b"x")
    found: list[str] = []
    assert store.inspect({"runs/run-a"}, found.append) == len(found) == 5
    for words in ("one: a is torn, 4 of 7", "one: b is missing", "left-by-a-crash is superfluous", "run-gone/manifest"):
        assert any(words in sentence for sentence in found), words
    assert store.inspect({"runs/run-a"}, print, tidy=True) == 5
    found.clear()
    assert store.inspect({"runs/run-a"}, found.append) == 2  # what is wrong stays, what was superfluous is gone
    bucket.overwrite(f"p/{MANIFEST}", b"{}")
    assert store.inspect({"runs/run-a"}, found.append, tidy=True) == 1 and "is damaged, and so all" in found[-1]
    assert a in bucket.objects()
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        read(store)


def test_the_cache_is_bounded_and_keeps_what_is_read(bucket: Objects, tmp_path: Path) -> None:
    store = opened(bucket, tmp_path, cache_bytes=250)
    places = [Place("runs/run-a", f"checkpoints/{number}") for number in range(4)]
    for place in places:
        write(store, {"a": os.urandom(100)}, place)

    def cached() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())

    assert cached() == 200
    (tmp_path / "cache" / ".new-left-by-a-crash").mkdir()
    with store.reading(places[0]) as folder:
        for place in places[1:]:
            assert len(read(store, place)["a"]) == 100
        assert len((folder / "a").read_bytes()) == 100
    file = next((tmp_path / "cache").rglob("a"))
    file.write_bytes(b"another" * 20)  # a disk that forgets
    assert all(len(read(store, place)["a"]) == 100 for place in places)
    assert cached() <= 250 and not list((tmp_path / "cache").glob(".*"))
