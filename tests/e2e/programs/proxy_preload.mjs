// Node 20's fetch ignores proxy variables; undici's agent, set before the program starts, heeds them.
import { EnvHttpProxyAgent, setGlobalDispatcher } from "undici";

setGlobalDispatcher(new EnvHttpProxyAgent());
