// Encrypts and decrypts bulltask's payloads (docs/reference/payloads.md). Payloads must be JSON.
import { createCipheriv, createDecipheriv, randomBytes } from 'node:crypto';
import { deflateSync, inflateSync } from 'node:zlib';

const KEY = 'bulltask:payload';
const MAX_BYTES = 100_000_000; // a small compressed payload may become large

/** Reads keys such as 'k1:NmQ0…', the first one for writing: the value of payload_encryption_keys for one queue. */
export function readKeys(text) {
  const pairs = text.split(/[\s,]+/).filter(Boolean).map((key) => key.split(':'));
  return new Map(pairs.map(([id, secret]) => [id, Buffer.from(secret, 'base64url')]));
}

const boundTo = (purpose, queue, owner, header) =>
  Buffer.from(JSON.stringify([KEY, 1, 'encryption', purpose, queue, owner, header.ser, header.zip ?? '', '', '']));

/** Returns the value of a stored payload. The owner is the task's name for 'arguments', the job's id for 'result'. */
export function decrypt(stored, keys, purpose, queue, owner) {
  if (!stored?.[KEY]) return stored;
  const { v, ser, zip, enc, iv, body } = stored[KEY];
  if (v !== 1 || ser !== 'json' || !['', 'zlib', undefined].includes(zip)) throw new Error(`cannot read ${ser} ${zip}`);
  let data = Buffer.from(body, 'base64');
  if (enc) {
    if (!keys.has(enc)) throw new Error(`no key ${enc}`);
    const cipher = createDecipheriv('aes-256-gcm', keys.get(enc), Buffer.from(iv, 'base64'), { authTagLength: 16 });
    cipher.setAAD(boundTo(purpose, queue, owner, { ser, zip })).setAuthTag(data.subarray(-16));
    data = Buffer.concat([cipher.update(data.subarray(0, -16)), cipher.final()]);
  }
  return JSON.parse(zip ? inflateSync(data, { maxOutputLength: MAX_BYTES }) : data);
}

/** Returns the payload to store for a value, encrypted with the first key; with `zip`, also compressed. */
export function encrypt(value, keys, purpose, queue, owner, zip = false) {
  const [[enc, key]] = keys;
  const [header, iv] = [{ v: 1, ser: 'json', ...(zip && { zip: 'zlib' }) }, randomBytes(12)];
  const text = Buffer.from(JSON.stringify(value ?? null));
  const cipher = createCipheriv('aes-256-gcm', key, iv).setAAD(boundTo(purpose, queue, owner, header));
  const parts = [cipher.update(zip ? deflateSync(text) : text), cipher.final(), cipher.getAuthTag()];
  return { [KEY]: { ...header, enc, iv: iv.toString('base64'), body: Buffer.concat(parts).toString('base64') } };
}
