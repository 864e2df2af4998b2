// Requests of @grpc/grpc-js to a pipeline. It reads one line of JSON: modules, descriptors, address, service, ca, headers,
// request, timeout_seconds. It prints another: live, numbers, unknown_model.
"use strict";
const fs = require("node:fs");
const { createRequire } = require("node:module");

const order = JSON.parse(fs.readFileSync(0, "utf8"));
const installed = createRequire(order.modules + "/");
const grpc = installed("@grpc/grpc-js");
const loader = installed("@grpc/proto-loader");

const options = { longs: Number, keepCase: true };
const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(order.descriptors), options);
const Service = order.service.split(".").reduce((at, name) => at[name], grpc.loadPackageDefinition(definition));
const credentials = order.ca ? grpc.credentials.createSsl(fs.readFileSync(order.ca)) : grpc.credentials.createInsecure();
const client = new Service(order.address, credentials);

function call(method, message) {
  const metadata = new grpc.Metadata();
  for (const [name, value] of Object.entries(order.headers)) metadata.set(name, value);
  const deadline = Date.now() + 1000 * order.timeout_seconds;
  return new Promise((resolve, reject) =>
    client[method](message, metadata, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer))),
  );
}

async function main() {
  const { live } = await call("ServerLive", {});
  // proto-loader takes a map that it knows from descriptors as what it is on the wire: entries.
  const parameters = Object.entries(order.request.parameters).map(([key, value]) => ({ key, value }));
  const request = { ...order.request, parameters };
  const answer = await call("ModelInfer", request);
  const raw = answer.raw_output_contents[0];
  const numbers = Array.from({ length: raw.length / 4 }, (_, index) => raw.readFloatLE(4 * index));
  const unknownModel = await call("ModelInfer", { ...request, model_name: "no-such-model" }).then(
    () => "OK",
    (error) => grpc.status[error.code],
  );
  console.log(JSON.stringify({ live, numbers, unknown_model: unknownModel }));
  client.close();
}

main().catch((error) => {
  console.error(String(error));
  process.exit(1);
});
