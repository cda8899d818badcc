// Node's own fetch.
const response = await fetch(process.env.TARGET_URL + "/echo", {
  headers: { Authorization: `Bearer ${process.env.API_KEY}` },
});
const text = await response.text();
if (!response.ok) throw new Error(`${response.status} ${response.statusText}: ${text}`);
console.log(response.status, JSON.stringify([...response.headers]), text);
