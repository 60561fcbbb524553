// The npm package `openai`, as its users write it: node --input-type=module - URL MODEL < client.mjs
import OpenAI, { toFile } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const talk = (n) => ({
  messages: [
    { role: "user", content: `${n} and two?` },
    { role: "assistant", content: "four" },
  ],
});
const rows = Array.from({ length: 32 }, (_, n) => JSON.stringify(talk(n))).join("\n");
const file = await client.files.create({ file: await toFile(Buffer.from(rows), "rows.jsonl"), purpose: "fine-tune" });
await client.files.waitForProcessing(file.id, { pollInterval: 200 });
const hyperparameters = { n_epochs: 2, batch_size: 2, learning_rate_multiplier: 50 };
let job = await client.fineTuning.jobs.create({
  model,
  training_file: file.id,
  seed: 7,
  method: { type: "supervised", supervised: { hyperparameters } },
  gradwire: { lora_rank: 0 },
});
while (!["succeeded", "failed", "cancelled"].includes(job.status)) {
  await new Promise((resolve) => setTimeout(resolve, 500));
  job = await client.fineTuning.jobs.retrieve(job.id);
}
const events = [];
for await (const event of client.fineTuning.jobs.listEvents(job.id, { limit: 7 })) events.push(event.message);
const steps = [];
for await (const each of client.fineTuning.jobs.checkpoints.list(job.id, { limit: 1 })) steps.push(each.step_number);
const refused = await client.fineTuning.jobs.cancel(job.id).catch((error) => `${error.status} ${error.message}`);
const answer = await client.chat.completions.create({
  model: job.fine_tuned_model,
  messages: [{ role: "user", content: "3 and two?" }],
  temperature: 0,
});
console.log(JSON.stringify({ status: job.status, events, steps, refused, answer: answer.choices[0].message.content }));
