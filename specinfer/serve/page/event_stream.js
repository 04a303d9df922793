// Server-sent events of a response as JSON values.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const whole = rest.split(/\r?\n\r?\n/);
      rest = whole.pop();
      for (const event of whole) {
        const data = dataOf(event);
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
