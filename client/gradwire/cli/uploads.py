"""``gradwire uploads``: list and delete the uploaded weights of a server."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwire.cli.listing import minute, print_listing
from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.text import size

app = typer.Typer(help="List and delete the uploaded weights of a server.", no_args_is_help=True)


@app.command("list")
@with_access
def list_uploads(access: Access) -> None:
    """List the uploads of your key, the oldest first."""
    with connected(access) as service:
        uploads = service.list_uploads()
    columns = ("upload", "kind", "model", "size", "arrived", "created", "owner")
    rows = [
        (
            upload.upload_id,
            upload.kind,
            upload.base_model,
            size(upload.size_bytes),
            "all" if upload.ready else size(upload.received_bytes),
            minute(upload.created_at),
            upload.owner,
        )
        for upload in uploads
    ]
    print_listing(columns, rows, empty=f"no uploads on {access.address}")


@app.command()
@with_access
def delete(
    access: Access,
    upload_ids: Annotated[list[str], typer.Argument(help="Ids of the uploads.", metavar="UPLOAD_ID...")],
) -> None:
    """Delete uploads; runs that were created from them stay as they are."""
    with connected(access) as service:
        for upload_id in upload_ids:
            service.delete_upload(upload_id)
            print(f"deleted {upload_id}")
