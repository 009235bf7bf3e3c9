// Loops of JavaScript's clients: ask, call a tool, send back what the client made of the answer, ask again.
// node clients.mjs URL CLIENT prints the calls and the last answer as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, client, folder] = process.argv.slice(2);
const resolve = createRequire(`${folder}/index.js`).resolve;
const load = async (name) => import(pathToFileURL(resolve(name)));
const parameters = { type: "object", properties: { days: { type: "integer", minimum: 1, maximum: 9 } }, required: ["days"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", description: "Weather.", parameters } }];
const messages = [{ role: "user", content: "Will it rain?" }];
const fields = { model: "target", tools, max_tokens: 40, temperature: 0 };

async function openai(streamed) {
  const { default: OpenAI } = await load("openai");
  const completions = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 }).chat.completions;
  const ask = async (body) => (streamed ? await completions.stream(body).finalChatCompletion() : await completions.create(body)).choices[0].message;
  const message = await ask({ ...fields, messages, tool_choice: "required", parallel_tool_calls: false });
  const [call] = message.tool_calls;
  messages.push(message, { role: "tool", tool_call_id: call.id, content: "rain" });
  const answer = await ask({ ...fields, messages, tool_choice: "none", max_tokens: 6 });
  return { call: JSON.parse(call.function.arguments), text: answer.content };
}

async function vercel(streamed) {
  const { generateText, streamText, tool, stepCountIs, isStepCount, jsonSchema } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const model = createOpenAICompatible({ name: "specdec", baseURL: url, apiKey: "none" })("target");
  let call;
  const weather = tool({ description: "Weather.", inputSchema: jsonSchema(parameters), execute: async (input) => ((call = input), "rain") });
  const stops = (stepCountIs ?? isStepCount)(2);
  const options = { model, tools: { weather }, prompt: "Will it rain?", maxOutputTokens: 40, temperature: 0, maxRetries: 0, stopWhen: stops };
  options.providerOptions = { specdec: { parallel_tool_calls: false } };
  options.prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
  if (!streamed) {
    const { text } = await generateText(options);
    return { call, text };
  }
  let fault;
  const result = streamText({ ...options, onError: ({ error }) => (fault = error) });
  const text = await result.text;
  if (fault) throw fault;
  return { call, text };
}

const loops = { openai: () => openai(false), "openai streamed": () => openai(true), vercel: () => vercel(false), "vercel streamed": () => vercel(true) };
console.log(JSON.stringify(await loops[client]()));
