"""The Anthropic SDK, whole and streaming. Reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY by itself."""

import anthropic

client = anthropic.Anthropic(max_retries=0)
for role in ("user",):
    message = client.messages.create(model="coat-1", max_tokens=9, messages=[{"role": role, "content": "hello"}])
    print(message.to_json())
    with client.messages.stream(model="coat-1", max_tokens=9, messages=[{"role": role, "content": "hello"}]) as stream:
        for text in stream.text_stream:
            print(text, end="|", flush=True)
