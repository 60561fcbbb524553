// Packages of npm, each as its users call it: `node packages.mjs NAME ADDRESS MODEL`; as packages.py does.
import assert from 'node:assert'
import fs from 'node:fs'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { generateObject, generateText, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { z } from 'zod'

const [name, address, model] = process.argv.slice(2)
const baseURL = `${address}/v1`
const messages = [{ role: 'user', content: 'the cat' }]
const weather = z.strictObject({ place: z.enum(['Bern', 'Oslo']), sky: z.enum(['clear', 'cloudy']) })

const clients = {
  async openai() {
    const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 })
    const asked = { model, messages, max_tokens: 8, temperature: 0 }
    const said = (await client.chat.completions.create(asked)).choices[0].message.content
    let streamed = ''
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      streamed += chunk.choices[0].delta.content ?? ''
    assert.equal(streamed, said)
    const options = { model, input: 'the cat', max_output_tokens: 16 }
    const first = await client.responses.create(options)
    const events = client.responses.stream({ ...options, previous_response_id: first.id })
    assert.ok((await events.finalResponse()).usage.output_tokens > 0)
    return said
  },
  async ai() {
    const openai = createOpenAI({ baseURL, apiKey: 'none' })
    const said = async (which) =>
      (await generateText({ model: which, prompt: 'the cat', maxOutputTokens: 8, temperature: 0 })).text
    const byResponses = await said(openai(model)) // the default of this provider
    const byChat = await said(openai.chat(model))
    assert.equal(byResponses, byChat)
    assert.equal(await said(createAnthropic({ baseURL, apiKey: 'none' })(model)), byChat)
    let streamed = ''
    for await (const part of streamText({ model: openai(model), prompt: 'the cat', maxOutputTokens: 8, temperature: 0 })
      .textStream)
      streamed += part
    assert.equal(streamed, byChat)
    for (const which of [openai(model), openai.chat(model)]) {
      const asked = { model: which, prompt: 'the cat', maxOutputTokens: 200 }
      weather.parse((await generateObject({ ...asked, schema: weather })).object)
      const tools = { tell: tool({ description: 'Tells.', inputSchema: weather }) }
      const { toolCalls } = await generateText({ ...asked, tools, toolChoice: 'required' })
      weather.parse(toolCalls[0].input)
    }
    return byChat
  },
}

const said = await clients[name]()
const version = JSON.parse(fs.readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version
console.log(JSON.stringify({ said, version }))
