"""Run the cookbook's `search_tool.train` without Google: with a Chroma of two texts, and embeddings made here.

``wikipedia.py FOLDER ARGUMENT...`` prints what was searched for, as JSON in its last line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import chromadb
import pandas
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

TEXTS = {"The cat sat on the mat.": [1.0, 0.0], "The dog lay on the log.": [0.0, 1.0]}
searched: list[str] = []


class Google(BaseHTTPRequestHandler):
    """Vertex AI's embeddings, and the token that its client wants first."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/token":
            answer: dict[str, object] = {"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}
        else:
            told = json.loads(body)
            asked = [each["content"]["parts"][0]["text"] for each in told.get("requests", [told])]
            searched.extend(asked)
            found = [{"values": [float("cat" in text), float("dog" in text)]} for text in asked]
            answer = {"embeddings": found, "embedding": found[0]}  # of several texts, and of one
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


def account(folder: Path, url: str) -> Path:
    """A service account whose tokens come from here."""
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key = rsa.generate_private_key(65537, 2048).private_bytes(*encoding).decode()
    told = {"type": "service_account", "client_email": "a@b", "private_key": key, "private_key_id": "1"}
    file = folder / "account.json"
    file.write_text(json.dumps(told | {"token_uri": url + "/token", "project_id": "1"}))
    return file


def filled(port: int) -> None:
    """Fill the Chroma, once it answers."""
    for _ in range(600):
        try:
            client = chromadb.HttpClient("localhost", port)
            break
        except ValueError:
            time.sleep(0.1)
    collection = client.create_collection("wiki_embeddings")
    collection.add(ids=["a", "b"], documents=list(TEXTS), embeddings=list(TEXTS.values()))


def main(folder: Path, *arguments: str) -> None:
    google = ThreadingHTTPServer(("127.0.0.1", 0), Google)
    Thread(target=google.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{google.server_port}"
    rows = [{"question": "Who sat?", "golden_answers": ["cat"], "data_source": "cats"}] * 16
    data = folder / ".cache/tinker-cookbook/PeterJinGo/nq_hotpotqa_train/train/train.parquet"
    data.parent.mkdir(parents=True)
    pandas.DataFrame(rows).to_parquet(data)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chroma = str(Path(sys.executable).with_name("chroma"))
    command = [chroma, "run", "--path", str(folder / "chroma"), "--port", str(port)]
    own = {
        "HOME": str(folder), "GCP_VERTEXAI_PROJECT_NUMBER": "1", "GCP_VERTEXAI_REGION": "here",
        "GOOGLE_APPLICATION_CREDENTIALS": str(account(folder, url)), "GOOGLE_VERTEX_BASE_URL": url,
    }  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as store:
        try:
            filled(port)
            recipe = [sys.executable, "-m", "tinker_cookbook.recipes.search_tool.train", f"chroma_port={port}"]
            subprocess.run([*recipe, *arguments], env=os.environ | own, check=True)
        finally:
            store.kill()
    print(json.dumps(searched))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
