"""What can be done from the console's pages, and what a viewer's key cannot."""

from __future__ import annotations

import tarfile
import time
from pathlib import Path

import gradwire
import httpx
import pytest
from gradwire import sync
from gradwire_server.access.key_file import KeyFile
from playwright.sync_api import Page, expect
from support.console import Console
from support.server import Server

pytestmark = [pytest.mark.long, pytest.mark.browser]

ROWS = {"input_ids": [[5, 6, 7, 8, 9, 10]] * 2}


def trained(service: sync.ServiceClient, name: str, *checkpoints: str) -> sync.TrainingClient:
    """A run that takes a step before each of these checkpoints."""
    run = service.create_run("tiny", lora={"rank": 2}, name=name, record_batches=1.0)
    for checkpoint in checkpoints:
        run.forward_backward(ROWS, "causal_lm")
        run.optim_step(learning_rate=1e-2).result(60)
        run.save_checkpoint(checkpoint, note=f"note of {checkpoint}").result(60)
    return run


def select(page: Page, key: str) -> None:
    page.get_by_role("checkbox", name=f"select {key}", exact=True).check()


def confirm(page: Page, name: str, typed: str = "") -> None:
    dialog = page.get_by_role("dialog")
    if typed:
        dialog.get_by_role("textbox").fill(typed)
    dialog.get_by_role("button", name=name, exact=True).click()


@pytest.mark.slow
def test_checkpoints_have_their_lineage_and_are_exported_and_deleted(
    console: Console, service: sync.ServiceClient, page: Page, tmp_path: Path
) -> None:
    run = trained(service, "of checkpoints", "one", "two", "three")
    child = service.fork_run(f"{run.run_id}/two", name="the child")
    page.goto(f"{console.url}/run/{run.run_id}/checkpoints")
    rows = page.get_by_role("region", name="Checkpoints").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("the child")
    expect(rows.nth(1)).to_contain_text("note of two")
    losses = [each for each in run.history()["loss"] if each == each]
    expect(rows.nth(1).locator("td").nth(3)).to_have_text(f"{losses[2]:.4g}")  # of the batch after two steps
    page.get_by_role("button", name="Export").click()
    expect(page.get_by_text("Select one checkpoint")).to_be_visible()
    select(page, "two")
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        confirm(page, "Export")
    expect(page.get_by_role("dialog")).to_have_count(0)
    with tarfile.open(download.value.path()) as archive:
        assert "./adapter_model.safetensors" in archive.getnames()
        archive.extractall(tmp_path, filter="data")
    whole = child.export(tmp_path / "child").result(60)
    assert (whole / "adapter_model.safetensors").read_bytes() == (tmp_path / "adapter_model.safetensors").read_bytes()
    page.get_by_role("button", name="Export").click()
    page.get_by_role("dialog").get_by_role("combobox").click()
    page.get_by_role("option", name="a whole model for transformers").click()
    with page.expect_download() as download:
        confirm(page, "Export")
    with tarfile.open(download.value.path()) as archive:
        assert {"./config.json", "./model.safetensors"} <= set(archive.getnames())
    select(page, "three")
    page.get_by_role("button", name="Try selected").click()
    page.wait_for_url(lambda url: "/playground?" in url)
    expect(page.get_by_text(f"{run.run_id}/two")).to_be_visible()
    page.goto(f"{console.url}/run/{child.run_id}/checkpoints")
    expect(page.get_by_text("the base model tiny")).to_be_visible()
    page.get_by_role("link", name="two of of checkpoints").click()
    select(page, "one")
    page.get_by_role("button", name="Delete").click()
    confirm(page, "Delete", "two")
    expect(page.get_by_text("Type one to confirm.")).to_be_visible()
    confirm(page, "Delete", "one")
    expect(rows).to_have_count(2)
    assert [each.name for each in run.list_checkpoints()] == ["two", "three"]
    assert {each.name for each in service.list_runs()} >= {"of checkpoints", "the child"}
    assert not [each for each in service.list_runs() if each.name == "export"]


@pytest.mark.slow
def test_an_adapter_is_uploaded_and_runs_begin_with_it(
    console: Console, service: sync.ServiceClient, page: Page, tmp_path: Path
) -> None:
    adapter = trained(service, "elsewhere", "kept").export(tmp_path / "adapter").result(60)
    page.goto(f"{console.url}/uploads")
    picker = page.locator("input[type=file]")
    picker.set_input_files(adapter / "adapter_config.json")
    expect(page.get_by_text("has no adapter_model.safetensors")).to_be_visible()
    picker.set_input_files([adapter / name for name in ("adapter_config.json", "adapter_model.safetensors")])
    expect(page.get_by_text("The adapter is on the server.")).to_be_visible()
    [upload] = service.list_uploads()
    line = page.get_by_role("region", name="Uploads").locator("tbody tr")
    expect(line).to_contain_text(upload.upload_id)
    select(page, upload.upload_id)
    page.get_by_role("button", name="Begin a run").click()
    expect(page.get_by_role("dialog")).to_contain_text(f'create_run(from_adapter="{upload.upload_id}")')
    confirm(page, "Begin")
    page.wait_for_url("**/run/*")
    [made] = [run for run in service.list_runs() if run.from_upload == upload.upload_id]
    assert page.url.endswith(made.run_id)
    page.goto(f"{console.url}/uploads")
    expect(line).to_contain_text(f"from {upload.upload_id}")
    select(page, upload.upload_id)
    page.get_by_role("button", name="Delete").click()
    confirm(page, "Delete", upload.upload_id)
    expect(page.get_by_text("No upload yet.")).to_be_visible()
    assert service.list_uploads() == [] and made.run_id in {run.run_id for run in service.list_runs()}


def test_an_operation_is_cancelled_and_its_script_goes_on(
    console: Console, service: sync.ServiceClient, page: Page
) -> None:
    run = trained(service, "with a slow sample", "kept")
    slow = run.sample([[5, 6]] * 64, n=8, max_tokens=240, ignore_eos=True)
    step = run.forward_backward(ROWS, "causal_lm")
    page.goto(f"{console.url}/run/{run.run_id}/journal")
    page.get_by_role("button", name="Cancel selected").click()
    expect(page.get_by_text("Select operations without a result")).to_be_visible()
    select(page, "4")
    select(page, "3")
    page.get_by_role("button", name="Cancel selected").click()
    expect(page.get_by_role("dialog")).to_contain_text("for seq in [3, 4]: await run.cancel_operation(seq)")
    confirm(page, "Cancel them")
    expect(page.get_by_text("1 of 2 cancelled. The others have ended")).to_be_visible()
    with pytest.raises(gradwire.OperationCancelledError):
        slow.result(60)
    assert step.result(60).loss is not None
    run.optim_step(learning_rate=1e-2).result(60)
    rows = page.get_by_role("region", name="Operations").locator("tbody tr")
    expect(rows.filter(has_text="sample")).to_contain_text("cancelled")
    with pytest.raises(gradwire.UnknownOperationError):
        run.cancel_operation(1000)


@pytest.mark.slow
def test_a_viewers_key_changes_nothing(tiny_model_path: Path, tmp_path: Path, page: Page) -> None:
    """It is offered no button that would, and is refused what it asks for by hand."""
    state = tmp_path / "state"
    state.mkdir()
    ada, viewer = KeyFile(state).create("ada", "user"), KeyFile(state).create("vic", "viewer")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "say {n}", "completion": "b"}}\n' for n in range(12)))
    with (
        Server(tiny_model_path, state, "--job-workers", "1") as server,
        Console(server.address, "--sign-in") as console,
        gradwire.sync.connect(server.address, api_key=ada) as service,
    ):
        run = trained(service, "of ada", "kept")
        stored = service.files.upload(data)
        exported = run.export(tmp_path / "adapter").result(60)
        settings = {"model": "tiny", "data": stored.file_id, "epochs": 10_000, "batch_size": 1, "max_tokens": 64}
        jobs = {name: service.jobs.submit("sft", settings, name=name).job_id for name in ("going", "ended")}
        service.jobs.cancel(jobs["ended"])
        service.jobs.wait(jobs["ended"], 60)
        while not service.jobs.get(jobs["going"]).step:  # its worker has made its run, the last thing that it adds
            assert not service.jobs.get(jobs["going"]).has_ended
            time.sleep(0.2)

        def seen() -> object:
            runs = sorted((each.run_id, each.accepted_seq) for each in service.list_runs() if each.name == "of ada")
            there = [(each.job_id, each.state == "cancelled") for each in service.jobs.list()]
            return runs, sorted(each.name for each in run.list_checkpoints()), there, len(service.files.list())

        before = seen()
        page.goto(f"{console.url}/login")
        page.get_by_label("Key of the server").fill(viewer)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("link", name="of ada")).to_be_visible()
        here = f"{console.url}/run/{run.run_id}"
        going, ended = (f"{console.url}/jobs/{jobs[name]}" for name in ("going", "ended"))
        offered = {
            here: ("Loss · ", ("Try kept", "Fork kept", "Save checkpoint", "Export", "Delete")),
            f"{here}/checkpoints": ("", ("Try selected", "Save checkpoint", "Fork", "Export", "Delete")),
            f"{here}/journal": ("", ("Cancel selected",)),
            going: ("", ("Pause", "Cancel")),
            ended: ("", ("Delete",)),
            f"{console.url}/jobs": ("", ("New training",)),
            f"{console.url}/playground": ("", ("Generate",)),
            f"{console.url}/uploads": ("", ("Upload an adapter…", "Begin a run", "Delete")),
        }
        for path, (there, denied) in offered.items():
            page.goto(path)
            expect(page.locator(".gw-state.connected")).to_be_visible()
            if there:
                expect(page.get_by_role("button", name=there)).to_be_visible()
            for button in denied:
                expect(page.get_by_role("button", name=button, exact=True), f"{button} at {path}").to_have_count(0)
            expect(page.locator("input[type=file]")).to_have_count(0)
        with gradwire.sync.connect(server.address, api_key=viewer) as reading:
            for work in (
                lambda: reading.get_training_client(run.run_id).save_checkpoint("mine").result(60),
                lambda: reading.fork_run(f"{run.run_id}/kept"),
                lambda: reading.sampling_client("tiny").sample("a", max_tokens=1).result(60),
                lambda: reading.delete_run(run.run_id),
                lambda: reading.jobs.cancel(jobs["going"]),
                lambda: reading.jobs.delete(jobs["ended"]),
                lambda: reading.files.upload(data),
                lambda: reading.upload_adapter(exported),
            ):
                with pytest.raises(gradwire.PermissionDeniedError, match="it reads everything and changes nothing"):
                    work()
        assert seen() == before and service.list_uploads() == []

        page.goto(f"{console.url}/server")
        shown = page.get_by_role("region", name="Keys").locator("tbody tr")
        expect(shown).to_have_count(2)
        expect(shown.first).to_contain_text("viewer")
        expect(shown.last.locator("td").nth(3)).to_have_text(str(len(service.list_runs())))
        assert [(each.name, each.role) for each in service.list_keys()] == [("ada", "user")], "no other key's"
        page.goto(f"{console.url}/audit")
        for key, done in (
            ("vic", "key made vic viewer"),
            ("ada", "run created of ada"),
            ("ada", "checkpoint saved of ada, kept note of kept"),
            ("ada", "job submitted going sft"),
            ("ada", "job cancelled ended"),
        ):
            expect(page.get_by_role("row", name=f"{key} {done}")).to_be_visible()
        cookies = {each["name"]: each["value"] for each in page.context.cookies()}
        with httpx.Client(base_url=console.url, cookies=cookies) as hand:
            assert len(hand.get("/api/runs").json()) == len(service.list_runs())
            paths = [
                "/",
                "/api/runs",
                f"/api/runs/{run.run_id}/checkpoints",
                f"/run/{run.run_id}",
                "/api/jobs",
            ]
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                for path in paths:
                    assert hand.request(method, path, json={"name": "x"}).status_code in (404, 405), (method, path)
            foreign = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
            assert hand.post("/api/runs", headers=foreign).status_code == 403
            assert hand.get("/api/runs", headers=foreign).status_code == 403
        with httpx.Client(base_url=console.url) as stranger:
            for path in (
                "/api/runs",
                f"/api/runs/{run.run_id}/metrics",
                "/api/queues",
                "/api/jobs",
                "/api/trace",
                "/api/audit",
            ):
                assert stranger.get(path).status_code == 401
        forged = {name: value[::-1] for name, value in cookies.items()}
        with httpx.Client(base_url=console.url, cookies=forged) as forger:
            assert forger.get("/api/runs").status_code == 401
        assert seen() == before
        page.context.clear_cookies()
        page.goto(here)
        page.get_by_label("Key of the server").fill(ada)
        page.get_by_role("button", name="Sign in").click()
        for button in offered[here][1]:
            expect(page.get_by_role("button", name=button, exact=True)).to_be_visible()
