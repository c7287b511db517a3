//! Used buffers on their way to be used again: no allocation for a usual request once the core is warm.

/// Buffers above this size are kept in a small number only.
const COMMON_BYTES_MAX: usize = 32 * 1024;
const COMMON_COUNT_MAX: usize = 1024;
/// Bytes that large buffers on the shelf may have together.
const LARGE_BYTES_MAX: usize = 16 << 20;

/// One core's used buffers.
#[derive(Default)]
pub struct Shelf {
    common: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
    large_bytes: usize,
}

impl Shelf {
    /// An empty buffer.
    pub fn take(&mut self) -> Vec<u8> {
        self.common
            .pop()
            .unwrap_or_else(|| Vec::with_capacity(2048))
    }

    /// The same bytes in a buffer with room for that many more, one that lay here if possible; whether it did.
    pub fn grow(&mut self, mut buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool) {
        let bytes = buffer.len() + more;
        if buffer.capacity() >= bytes {
            return (buffer, false);
        }
        let Some(at) = self
            .large
            .iter()
            .rposition(|large| large.capacity() >= bytes)
        else {
            buffer.reserve_exact(more);
            return (buffer, false);
        };
        let mut large = self.large.swap_remove(at);
        self.large_bytes -= large.capacity();
        large.extend_from_slice(&buffer);
        self.put(buffer);
        (large, true)
    }

    /// Puts a buffer back.
    pub fn put(&mut self, mut buffer: Vec<u8>) {
        buffer.clear();
        let bytes = buffer.capacity();
        if bytes <= COMMON_BYTES_MAX {
            if bytes >= 512 && self.common.len() < COMMON_COUNT_MAX {
                self.common.push(buffer);
            }
        } else if self.large_bytes + bytes <= LARGE_BYTES_MAX {
            self.large_bytes += bytes;
            self.large.push(buffer);
        }
    }
}
