"""Limits on the requests of one client."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits on the requests of one client. Sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_message_bytes: int = Field(default=8 << 20, ge=2 << 20, description="one gRPC message")
    max_http_body_bytes: int = Field(
        default=64 << 20, ge=1 << 16, description="the body of one HTTP request, decompressed"
    )
    max_json_body_bytes: int = Field(default=8 << 20, ge=1 << 16, description="one that is JSON")
    max_json_values: int = Field(
        default=132 << 10, ge=1024, description="values of it, such as token ids; they hold up all other requests"
    )
    max_json_containers: int = Field(default=16 << 10, ge=1024, description="lists, objects and keys of it")
    max_message_fields: int = Field(
        default=1 << 16, ge=1024, description="fields of one gRPC message; they hold up all other requests"
    )
    max_payload_bytes: int = Field(default=1 << 30, ge=1, description="the tensors of one operation")
    max_tensors: int = Field(default=64, ge=1, description="tensors of one operation")
    max_rows: int = Field(default=65_536, ge=1, description="rows of one batch")
    max_queued_operations: int = Field(default=16_384, ge=1, description="operations of a run without a result")
    max_queued_bytes: int = Field(default=8 << 30, ge=1, description="payloads of a run's operations without a result")
    max_window: int = Field(default=1024, ge=1, description="how far a number may be ahead of the next expected one")
    max_window_bytes: int = Field(default=1 << 30, ge=1, description="payloads that wait in memory for such a number")
    max_runs: int = Field(default=1000, ge=1, description="runs that the server keeps")
    max_encode_texts: int = Field(
        default=4096, ge=1, description="texts of one Encode, sequences of one Decode, conversations of one Render"
    )
    max_messages: int = Field(default=512, ge=1, description="messages of one conversation to render")
    max_name_chars: int = Field(default=200, ge=1, description="characters of a run's name, a tag or a writer")
    max_tags: int = Field(default=64, ge=0, description="tags of a run, and modules that an adapter is put on")
    max_images: int = Field(default=4096, ge=0, description="distinct images of one batch or sampling")
    max_image_bytes: int = Field(default=32 << 20, ge=1, description="one image, as it is sent")
    max_pixels: int = Field(default=1 << 28, ge=1, description="pixels of the images of one batch or sampling")
    max_row_tokens: int = Field(default=1 << 20, ge=1, description="tokens of one row")
    max_batch_tokens: int = Field(default=1 << 26, ge=1, description="tokens of one batch")
    max_samples: int = Field(default=65_536, ge=1, description="prompts times n of one sampling")
    max_sample_tokens: int = Field(default=131_072, ge=1, description="max_tokens of one sampling")
    max_stops: int = Field(default=64, ge=0, description="stop strings of one sampling, and stop tokens")
    max_stop_chars: int = Field(default=1000, ge=1, description="characters of one stop string")
    max_logit_biases: int = Field(default=4096, ge=0, description="tokens whose logits one sampling changes")
    max_top_logprobs: int = Field(default=128, ge=0, description="most probable tokens returned in each place")
    max_text_chars: int = Field(default=1 << 20, ge=1, description="characters of one prompt or text to encode")
    max_kwargs_chars: int = Field(default=1 << 18, ge=2, description="characters of a loss's arguments or a schema")
    max_schema_entries: int = Field(
        default=4096,
        ge=1,
        description="lists, objects and keys of a JSON schema, whose compilation may take 10 s and 2 GiB",
    )
    max_string_chars: int = Field(default=4096, ge=1, description="characters of any other string of an operation")
    max_checkpoints: int = Field(default=1000, ge=1, description="checkpoints that a run keeps")
    max_checkpoint_bytes: int = Field(default=1 << 40, ge=1, description="what the checkpoints of a run hold together")
    max_upload_bytes: int = Field(default=256 << 30, ge=1, description="the files of one upload")
    max_file_bytes: int = Field(default=8 << 30, ge=1, description="one file of training data")
    max_files: int = Field(default=10_000, ge=0, description="files that the server keeps")
    max_jobs: int = Field(default=10_000, ge=0, description="jobs that the server keeps, ended ones included")
    max_history_points: int = Field(default=100_000, ge=16, description="operations in a run's record, then thinned")
    max_recorded_bytes: int = Field(
        default=64 << 20, ge=1, description="recorded batches and rollouts of a run; the oldest go beyond it"
    )
    max_incoming_bytes: int = Field(default=4 << 30, ge=1, description="payloads of one key that are not on disk yet")
    key_runs: int = Field(default=1000, ge=0, description="runs of one key")
    key_memory_percent: int = Field(
        default=50, ge=1, le=100, description="part of the engine's memory for one key's runs, where there are several"
    )
    key_upload_bytes: int = Field(default=1 << 40, ge=0, description="uploads of one key, unfinished ones included")
    key_file_bytes: int = Field(default=64 << 30, ge=0, description="files of one key")
    key_jobs: int = Field(default=100, ge=0, description="jobs of one key that have not ended")
    key_running_jobs: int = Field(default=1000, ge=1, description="jobs of one key that run at a time; others wait")
    key_queued_operations: int = Field(default=65_536, ge=1, description="operations of one key without a result")
    key_queued_bytes: int = Field(default=32 << 30, ge=1, description="payloads of a key's operations without a result")
    max_part_bytes: int = Field(
        default=4 << 30, ge=1, description="parts of a batch that a run's engine holds until the last one comes"
    )
    key_part_bytes: int = Field(default=16 << 30, ge=1, description="those of all runs of one key")
    key_waiting_calls: int = Field(default=4096, ge=1, description="calls of one key that wait for their turn")
    key_call_bytes: int = Field(
        default=256 << 20, ge=1, description="bodies of one key's calls in memory, operations not included"
    )
    key_records: int = Field(
        default=50_000, ge=1, description="sessions, models and samplers of one key through Tinker's protocol"
    )
    key_streams: int = Field(
        default=1024, ge=1, description="streams of operations and results of one key, and HTTP requests"
    )
    max_session_turns: int = Field(default=100_000, ge=1, description="answered calls of one rollout session")
    max_session_seconds: int = Field(default=7 * 86_400, ge=1, description="seconds from a rollout session's creation")
    max_session_calls: int = Field(default=64, ge=1, description="calls of one rollout session at a time; others wait")
    session_idle_seconds: int = Field(
        default=3600, ge=1, description="seconds without a call after which a rollout session ends"
    )
    key_sessions: int = Field(default=4096, ge=0, description="rollout sessions of one key that have not ended")
    key_session_bytes: int = Field(
        default=16 << 30, ge=0, description="turns of one key's rollout sessions; the oldest ended ones go beyond it"
    )
    key_tokens_per_minute: int = Field(default=0, ge=0, description="tokens that one key submits a minute; 0: no limit")
