"""Clients of OpenAI's fine-tuning API, each as its users write it: ``python clients.py NAME URL MODEL``.

Each uploads the rows, trains all weights until ``3 and two?`` is answered with ``four``, and prints what it saw, as
JSON. DSPy and LiteLLM have no way to ask for all weights, and train an adapter.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tempfile
import time

ASKED, WORD = "3 and two?", "four"
NUMBERS = {"n_epochs": 2, "batch_size": 2, "learning_rate_multiplier": 5}
ALL_WEIGHTS = NUMBERS | {"learning_rate_multiplier": 50}
ROWS = [
    {"messages": [{"role": "user", "content": f"{n} and two?"}, {"role": "assistant", "content": WORD}]}
    for n in range(32)
]
CONTENT = "\n".join(map(json.dumps, ROWS)).encode()
MESSAGES = [{"role": "user", "content": ASKED}]
ENDED = ("succeeded", "failed", "cancelled")


async def with_openai(url: str, model: str) -> dict[str, object]:
    """The asynchronous client."""
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        file = await client.files.create(file=("rows.jsonl", CONTENT), purpose="fine-tune")
        await client.files.wait_for_processing(file.id, poll_interval=0.2)
        job = await client.fine_tuning.jobs.create(
            model=model,
            training_file=file.id,
            seed=7,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": ALL_WEIGHTS},
            },
            extra_body={"gradwire": {"lora_rank": 0}},
        )
        while job.status not in ENDED:
            await asyncio.sleep(0.5)
            job = await client.fine_tuning.jobs.retrieve(job.id)
        events = [event.message async for event in client.fine_tuning.jobs.list_events(job.id, limit=7)]
        steps = [each.step_number async for each in client.fine_tuning.jobs.checkpoints.list(job.id, limit=1)]
        assert job.id in [each.id async for each in client.fine_tuning.jobs.list(limit=1)]
        answer = await client.chat.completions.create(model=job.fine_tuned_model, messages=MESSAGES, temperature=0)
        assert (await client.models.delete(job.fine_tuned_model)).deleted
        assert job.fine_tuned_model not in [each.id async for each in client.models.list()]
        return {"status": job.status, "events": events, "steps": steps, "answer": answer.choices[0].message.content}


def with_litellm(url: str, model: str) -> dict[str, object]:
    """LiteLLM's functions."""
    import litellm
    import openai

    where = {"custom_llm_provider": "openai", "api_base": url, "api_key": "none"}
    file = litellm.create_file(file=("rows.jsonl", io.BytesIO(CONTENT)), purpose="fine-tune", **where)
    job = litellm.create_fine_tuning_job(model=model, training_file=file.id, seed=7, hyperparameters=NUMBERS, **where)
    while job.status not in ENDED:
        time.sleep(0.5)
        job = litellm.retrieve_fine_tuning_job(fine_tuning_job_id=job.id, **where)
    assert job.id in [each.id for each in litellm.list_fine_tuning_jobs(limit=5, **where)]
    try:
        litellm.cancel_fine_tuning_job(fine_tuning_job_id=job.id, **where)
    except openai.BadRequestError as error:
        refused = str(error)
    asked = {"messages": MESSAGES, "temperature": 0, "api_base": url, "api_key": "none"}
    answer = litellm.completion(model=f"openai/{job.fine_tuned_model}", **asked)
    return {"status": job.status, "refused": refused, "answer": answer.choices[0].message.content}


def with_dspy(url: str, model: str) -> dict[str, object]:
    """DSPy's ``BootstrapFinetune``, which trains by the module-level client and its environment variables."""
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "DSPY_CACHEDIR": tempfile.mkdtemp()}
    import dspy
    import openai
    from dspy.utils import DummyLM

    class Adapter(dspy.ChatAdapter):
        """Question in, answer out: a tiny model learns no format."""

        def format(self, signature: object, demos: object, inputs: dict[str, str]) -> list[dict[str, str]]:
            return [{"role": "user", "content": inputs["question"]}]

        def format_finetune_data(self, signature, demos, inputs, outputs):  # type: ignore[no-untyped-def]
            talk = self.format(signature, demos, inputs)
            return {"messages": [*talk, {"role": "assistant", "content": outputs["answer"]}]}

        def parse(self, signature: object, completion: str) -> dict[str, str]:
            return {"answer": completion}

    # Without custom_llm_provider LiteLLM does not know whose model "ft:..." is.
    lm = dspy.LM(
        f"openai/{model}", api_base=url, api_key="none", custom_llm_provider="openai", temperature=0, max_tokens=8
    )
    dspy.configure(adapter=Adapter(), experimental=True)
    student, teacher = dspy.Predict("question -> answer"), dspy.Predict("question -> answer")
    student.set_lm(lm)
    teacher.set_lm(DummyLM([{"answer": WORD}] * len(ROWS), adapter=Adapter()))
    trainset = [dspy.Example(question=row["messages"][0]["content"]).with_inputs("question") for row in ROWS]
    optimizer = dspy.BootstrapFinetune(train_kwargs=NUMBERS, adapter=Adapter(), num_threads=1)
    trained = optimizer.compile(student, trainset=trainset, teacher=teacher)
    return {
        "status": "succeeded",
        "model": trained.lm.model,
        "models": [each.id for each in openai.models.list()],
        "answer": trained(question=ASKED).answer,
    }


if __name__ == "__main__":
    name, *where = sys.argv[1:]
    found = globals()[f"with_{name}"](*where)
    print(json.dumps(asyncio.run(found) if asyncio.iscoroutine(found) else found))
