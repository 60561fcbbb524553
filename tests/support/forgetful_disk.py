"""A file system that forgets what was not fsynced when the power goes: python forgetful_disk.py DISK MOUNT SEED.

It mounts a copy of the folder DISK at MOUNT and keeps everything in memory. Unmounting it is the power cut: what goes
back to DISK is what a disk would hold then. The content of a file survives as far as an fsync of the file confirmed it,
a name in a folder as far as an fsync of that folder did. Of what was written after that, SEED decides: half of the time
nothing survives, else some pages of 4 KiB and the first few changes of names, because disks write in any order.

The idea is LazyFS's (Ramos et al., "When Amnesia Strikes", VLDB 2024, https://doi.org/10.14778/3681954.3681980).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = 4096


@dataclasses.dataclass(eq=False)
class File:
    """Bytes as programs see them, and as the disk has them."""

    mode: int
    live: bytearray = dataclasses.field(default_factory=bytearray)
    durable: bytes = b""
    dirty: set[int] = dataclasses.field(default_factory=set)
    """Pages written since the last fsync."""
    modified_ns: int = dataclasses.field(default_factory=time.time_ns)
    links: int = 0

    def write(self, data: bytes, offset: int) -> None:
        if offset > len(self.live):
            self.truncate(offset)
        self.live[offset : offset + len(data)] = data
        self.dirty.update(range(offset // PAGE, (offset + len(data)) // PAGE + 1))
        self.modified_ns = time.time_ns()

    def truncate(self, length: int) -> None:
        before = len(self.live)
        if length < before:
            del self.live[length:]
        else:
            self.live.extend(bytes(length - before))
        self.dirty.update(range(min(before, length) // PAGE, max(before, length) // PAGE + 1))
        self.modified_ns = time.time_ns()

    def sync(self) -> None:
        if self.dirty or len(self.live) != len(self.durable):
            self.durable = bytes(self.live)
            self.dirty.clear()

    def surviving(self, rng: random.Random | None) -> bytes:
        """What the disk has after a power cut; a generator makes some of the unconfirmed pages survive."""
        if rng is None or not self.dirty:
            return self.durable
        content = bytearray(self.durable)
        length = rng.choice((len(self.live), len(self.durable)))
        del content[length:]
        content.extend(bytes(length - len(content)))
        for page in sorted(self.dirty):
            if rng.random() < 0.5:
                written = self.live[page * PAGE : min((page + 1) * PAGE, length)]
                content[page * PAGE : page * PAGE + len(written)] = written
        return bytes(content)


@dataclasses.dataclass(eq=False)
class Folder:
    """Names as programs see them, and as the disk has them."""

    mode: int = stat.S_IFDIR | 0o755
    live: dict[str, File | Folder] = dataclasses.field(default_factory=dict)
    durable: dict[str, File | Folder] = dataclasses.field(default_factory=dict)
    modified_ns: int = dataclasses.field(default_factory=time.time_ns)


Change = list[tuple[Folder, str, File | Folder | None]]
"""Names that change together: a rename changes two."""


class Disk:
    """The tree, and the changes of names that no fsync of a folder has confirmed, oldest first."""

    def __init__(self, source: Path) -> None:
        self.root = self._load(source)
        self._pending: list[Change] = []
        self.fsyncs = 0

    def _load(self, source: Path) -> Folder:
        folder = Folder()
        for entry in source.iterdir():
            child: File | Folder
            if entry.is_dir():
                child = self._load(entry)
            else:
                content = entry.read_bytes()
                child = File(entry.stat().st_mode, bytearray(content), content, links=1)
            folder.live[entry.name] = child
        folder.durable = dict(folder.live)
        return folder

    def find(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for name in path.strip("/").split("/") if path.strip("/") else ():
            if not isinstance(node, Folder) or name not in node.live:
                raise OSError(errno.ENOENT, path)
            node = node.live[name]
        return node

    def place(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        folder = self.find(parent)
        if not isinstance(folder, Folder):
            raise OSError(errno.ENOTDIR, path)
        return folder, name

    def change(self, *names: tuple[Folder, str, File | Folder | None]) -> None:
        """Enter a node under a name, or take a name away; several at once are one change."""
        for folder, name, node in names:
            before = folder.live.pop(name, None)
            if isinstance(before, File):
                before.links -= 1
            if node is not None:
                folder.live[name] = node
                if isinstance(node, File):
                    node.links += 1
            folder.modified_ns = time.time_ns()
        self._pending.append(list(names))

    def sync_folder(self, folder: Folder) -> None:
        """Confirm the names of a folder, and of those folders that share a rename with it."""
        folders, before = {folder}, 0
        while len(folders) != before:
            before = len(folders)
            for change in self._pending:
                touched = {entry[0] for entry in change}
                if touched & folders:
                    folders |= touched
        kept = []
        for change in self._pending:
            if any(entry[0] in folders for entry in change):
                self._confirm(change)
            else:
                kept.append(change)
        self._pending = kept

    def _confirm(self, change: Change) -> None:
        for folder, name, node in change:
            folder.durable.pop(name, None)
            if node is not None:
                folder.durable[name] = node

    def cut_power(self, target: Path, rng: random.Random) -> str:
        """Write what a disk would hold now; the sentence says what was forgotten."""
        chance = rng if rng.random() < 0.5 else None
        unnamed, unwritten = sorted({name for change in self._pending for _, name, _ in change}), 0
        if chance is not None:
            for change in self._pending[: chance.randint(0, len(self._pending))]:
                self._confirm(change)
        written: set[File] = set()
        shutil.rmtree(target)
        for folder, path in self._durable_folders(self.root, target):
            path.mkdir()
            for name, node in folder.durable.items():
                if isinstance(node, File):
                    unwritten += len(node.dirty) if node not in written else 0
                    written.add(node)
                    (path / name).write_bytes(node.surviving(chance))
                    (path / name).chmod(stat.S_IMODE(node.mode))
        kept = "some of it kept" if chance else "all of it lost"
        return f"{unwritten} unconfirmed pages, unconfirmed names: {', '.join(unnamed) or 'none'}; {kept}"

    def _durable_folders(self, folder: Folder, path: Path) -> Iterator[tuple[Folder, Path]]:
        yield folder, path
        for name, node in folder.durable.items():
            if isinstance(node, Folder):
                yield from self._durable_folders(node, path / name)


def operations(disk: Disk, target: Path, seed: int) -> Any:
    """The disk as FUSE's callbacks; unmounting cuts the power."""
    import mfusepy

    handles: dict[int, File | Folder] = {}

    def open_node(node: File | Folder) -> int:
        handle = max(handles, default=0) + 1
        handles[handle] = node
        return handle

    def attributes(node: File | Folder) -> dict[str, Any]:
        size, links = (len(node.live), node.links) if isinstance(node, File) else (0, 2)
        times = dict.fromkeys(("st_mtime", "st_atime", "st_ctime"), node.modified_ns)
        return {"st_mode": node.mode, "st_size": size, "st_nlink": links, "st_uid": os.getuid(),
                "st_gid": os.getgid(), "st_blocks": -(-size // 512), **times}  # fmt: skip

    class ForgetfulDisk(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            return attributes(handles[fh] if fh in handles else disk.find(path))

        def readdir(self, path: str, fh: int) -> Any:
            folder = disk.find(path)
            assert isinstance(folder, Folder)
            return [".", "..", *folder.live]

        def opendir(self, path: str) -> int:
            return open_node(disk.find(path))

        def releasedir(self, path: str, fh: int) -> int:
            handles.pop(fh, None)
            return 0

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            file = File(stat.S_IFREG | stat.S_IMODE(mode))
            folder, name = disk.place(path)
            disk.change((folder, name, file))
            return open_node(file)

        def open(self, path: str, flags: int) -> int:
            return open_node(disk.find(path))

        def release(self, path: str, fh: int) -> int:
            handles.pop(fh, None)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return bytes(memoryview(handles[fh].live)[offset : offset + size])  # type: ignore[arg-type]

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            file = handles[fh]
            assert isinstance(file, File)
            file.write(data, offset)
            return len(data)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            file = handles[fh] if fh in handles else disk.find(path)
            assert isinstance(file, File)
            file.truncate(length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            file = handles[fh]
            assert isinstance(file, File)
            file.sync()
            disk.fsyncs += 1
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            folder = handles[fh]
            assert isinstance(folder, Folder)
            disk.sync_folder(folder)
            disk.fsyncs += 1
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            folder, name = disk.place(path)
            disk.change((folder, name, Folder(stat.S_IFDIR | stat.S_IMODE(mode))))
            return 0

        def rmdir(self, path: str) -> int:
            node = disk.find(path)
            if isinstance(node, Folder) and node.live:
                raise OSError(errno.ENOTEMPTY, path)
            disk.change((*disk.place(path), None))
            return 0

        def unlink(self, path: str) -> int:
            disk.find(path)
            disk.change((*disk.place(path), None))
            return 0

        def link(self, target: str, source: str) -> int:
            disk.change((*disk.place(target), disk.find(source)))
            return 0

        def rename(self, old: str, new: str) -> int:
            node = disk.find(old)
            folder, name = disk.place(new)
            replaced = folder.live.get(name)
            if isinstance(replaced, Folder) and replaced.live:
                raise OSError(errno.ENOTEMPTY, new)
            if replaced is not node:
                disk.change((*disk.place(old), None), (folder, name, node))
            return 0

        def chmod(self, path: str, mode: int) -> int:
            node = disk.find(path)
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            disk.find(path).modified_ns = times[1] if times else time.time_ns()
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            blocks = 1 << 20
            return {"f_bsize": PAGE, "f_frsize": PAGE, "f_blocks": blocks, "f_bfree": blocks, "f_bavail": blocks,
                    "f_files": blocks, "f_ffree": blocks, "f_favail": blocks, "f_namemax": 255}  # fmt: skip

        def destroy(self, path: str) -> None:
            said = disk.cut_power(target, random.Random(seed))
            target.with_suffix(".cut").write_text(f"{disk.fsyncs} fsyncs, {said}")

    return ForgetfulDisk()


def unavailable() -> str:
    """Why this file system cannot be mounted here, or nothing."""
    if shutil.which("fusermount3") is None or not Path("/dev/fuse").exists():
        return "FUSE is missing: install Debian's fuse3, and give the container /dev/fuse"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy is missing: {error}"
    return ""


class Power:
    """The disk's mount, for a test: on, cut, on again."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "mount"
        self._disk = folder / "disk"
        self.mount.mkdir(parents=True)
        self._disk.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def on(self, seed: int) -> None:
        """Mount what the disk holds; the seed decides what the next cut leaves of what is not confirmed."""
        command = [sys.executable, __file__, str(self._disk), str(self.mount), str(seed)]
        self._process = subprocess.Popen(command)
        deadline = time.monotonic() + 30
        while not os.path.ismount(self.mount):
            assert self._process.poll() is None, f"the file system ended with {self._process.returncode}"
            assert time.monotonic() < deadline, "the file system was not mounted within 30 s"
            time.sleep(0.01)

    def cut(self) -> str:
        """Forget what was not confirmed, once nobody has a file open any more. Says what was forgotten."""
        assert self._process is not None
        deadline = time.monotonic() + 30
        unmount = ["fusermount3", "-u", str(self.mount)]
        while (done := subprocess.run(unmount, capture_output=True, text=True)).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.05)
        assert self._process.wait(60) == 0
        return self._disk.with_suffix(".cut").read_text()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            subprocess.run(["fusermount3", "-u", "-z", str(self.mount)], check=True)
            self._process.wait(60)


if __name__ == "__main__":
    import mfusepy

    source, mount, chosen = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    mfusepy.FUSE(operations(Disk(source), source, chosen), mount, foreground=True, nothreads=True, hard_remove=True)
