//! What a request holds in memory, counted against the limits: its body while it is read and until it is sent, and all of it
//! while it waits.

use super::{Exchange, Outcome, World, wait};
use crate::http::Refusal;

/// Bodies up to this size are not counted: the number of connections bounds them.
const UNCOUNTED_BYTES_MAX: usize = 32 * 1024;

/// The largest body that a request may have which is read whole: one that is over the memory's limit can never be.
pub(super) fn body_memory_max<W: World>(world: &W) -> u64 {
    let limits = world.config().body_memory;
    let least = limits.part_bytes.min(limits.whole_bytes);
    least.max(UNCOUNTED_BYTES_MAX as u64)
}

/// Counts what has come of a body.
///
/// # Errors
/// There is no room for it.
pub(super) fn hold_body<W: World>(
    exchange: &mut Exchange,
    bytes: usize,
    world: &mut W,
) -> Result<(), (Refusal, Outcome)> {
    if bytes <= UNCOUNTED_BYTES_MAX || world.hold_body(&mut exchange.body_held, bytes as u64) {
        return Ok(());
    }
    let mut refusal = Refusal::new(
        503,
        "body_memory_full",
        "too many bytes of other requests' bodies are in memory (--body-memory-bytes, --body-memory-bytes-per-core)",
    );
    refusal.retry_after_secs = world.retry_after_secs();
    Err((refusal, Outcome::Overloaded))
}

/// Counts a request that is to wait.
///
/// # Errors
/// Too many bytes wait.
pub(super) fn hold_in_queue<W: World>(
    exchange: &mut Exchange,
    world: &mut W,
) -> Result<(), (Refusal, Outcome)> {
    let bytes = exchange.message.len() as u64;
    if world.hold_in_queue(&mut exchange.queue_held, bytes) {
        return Ok(());
    }
    let message = "too many bytes of requests wait (--queue-bytes)";
    let (mut refusal, outcome) = wait::overloaded(429, message, world);
    refusal.code = "queue_bytes_full";
    Err((refusal, outcome))
}
