// undici as a library: a ProxyAgent made by hand, as programs do that were given a proxy's URL.
import { Agent, ProxyAgent, request } from "undici";

const { API_KEY, HTTPS_PROXY, TARGET_URL } = process.env;
const dispatcher = HTTPS_PROXY ? new ProxyAgent(HTTPS_PROXY) : new Agent();
for (let turn = 0; turn < 2; turn++) {
  const { statusCode, headers, body } = await request(TARGET_URL + "/echo", {
    dispatcher,
    headers: { Authorization: `Bearer ${API_KEY}` },
  });
  const text = await body.text();
  if (statusCode !== 200) throw new Error(`${statusCode} ${text}`);
  console.log(statusCode, JSON.stringify(headers), text);
}
await dispatcher.close();
