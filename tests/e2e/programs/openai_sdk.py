"""The OpenAI SDK: chat completions and responses, whole and streaming. Reads OPENAI_BASE_URL and OPENAI_API_KEY."""

import openai

client = openai.OpenAI(max_retries=0)
chat = client.chat.completions.create(model="coat-1", messages=[{"role": "user", "content": "hello"}])
print(chat.to_json())
for part in client.chat.completions.create(
    model="coat-1", messages=[{"role": "user", "content": "hello"}], stream=True
):
    print(part.choices[0].delta.content or "", end="|", flush=True)
print(client.responses.create(model="coat-1", input="hello").to_json())
for event in client.responses.create(model="coat-1", input="hello", stream=True):
    print(getattr(event, "delta", ""), end="|", flush=True)
