// llama.cpp by node-llama-cpp, whose libraries come prebuilt: `npm install node-llama-cpp@3.21.1
// --ignore-scripts`, in a folder that NODE_LLAMA names. It answers the jobs of `protocol.py`, one
// prompt at a time: `node llama_worker.mjs FILE.gguf`.
import {createRequire} from "node:module";
import os from "node:os";
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const installed = createRequire(path.resolve(process.env.NODE_LLAMA, "package.json"));
const {getLlama} = await import(pathToFileURL(installed.resolve("node-llama-cpp")));
const say = (message) => console.log("peer: " + JSON.stringify(message));

const threads = os.availableParallelism();
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath: process.argv[2]});
const sequence = (await model.createContext({contextSize: 2048, threads})).getSequence();

async function answer({prompts, max_new_tokens, temperature, top_p, seed}) {
    const drawn = {temperature, topK: 0, topP: top_p, minP: 0, seed, yieldEogToken: true};
    const tokens = [];
    for await (const token of sequence.evaluate(prompts[0], drawn)) {
        tokens.push(token);
        if (model.isEogToken(token) || tokens.length === max_new_tokens) break;
    }
    return {answers: [tokens]};
}

// Of each token after the first: its log probability, and the most probable one there.
async function judge([prompt]) {
    const options = {temperature: 1, topK: 0, topP: 1, minP: 0};
    const input = prompt.slice(0, -1).map((t) => [t, {generateNext: {probabilities: true, options}}]);
    const logProbs = [], best = [];
    const onTokenResult = (place, {next: {probabilities}}) => {
        logProbs[place] = Math.log(probabilities.get(prompt[place + 1]));
        best[place] = probabilities.keys().next().value;
    };
    await sequence.controlledEvaluate(input, {onTokenResult});
    return {log_probs: logProbs, best};
}

say({version: `llama.cpp ${llama.llamaCppRelease.release}`, largest_batch: 1});
for await (const line of readline.createInterface({input: process.stdin})) {
    const job = JSON.parse(line), began = performance.now();
    await sequence.clearHistory();
    const found = job.max_new_tokens ? await answer(job) : await judge(job.prompts);
    say({...found, seconds: (performance.now() - began) / 1000});
}
process.exit();
