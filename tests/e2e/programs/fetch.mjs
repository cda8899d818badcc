// Node's own fetch.
const response = await fetch(process.env.TARGET_URL + "/echo", {
  headers: { Authorization: `Bearer ${process.env.API_KEY}` },
});
if (!response.ok) throw new Error(`status ${response.status}`);
console.log(response.status, JSON.stringify([...response.headers]), await response.text());
