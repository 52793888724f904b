-- Sends the body in the file WRK_BODY again and again; tells what came of it in one line of JSON.
local file = assert(io.open(os.getenv("WRK_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = os.getenv("WRK_TYPE")
wrk.headers["Inference-Header-Content-Length"] = os.getenv("WRK_HEADER_LENGTH")

function done(summary, latency)
  local errors = summary.errors
  local bad = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format(
    '{"requests": %d, "seconds": %f, "p50_s": %f, "p99_s": %f, "max_s": %f, "bad": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    latency.max / 1e6, bad))
end
