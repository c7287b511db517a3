//! A prompt's chain of hashes, cut down to what says how far it is the same as another one.

use shards::PrefixHash;

/// Blocks at whose end a hash is kept: all up to 16, eight for each doubling up to 256, fewer after. The same in all
/// sketches, so that two can be compared.
pub const GRID: [u16; 62] = grid();

const fn grid() -> [u16; 62] {
    let mut grid = [0; 62];
    let (mut at, mut block, mut index) = (0, 1, 0);
    while index < grid.len() {
        grid[index] = block;
        at += 1;
        let step = match block {
            ..16 => 1,
            16..32 => 2,
            32..64 => 4,
            64..128 => 8,
            128..256 => 16,
            256..512 => 64,
            512..1024 => 128,
            1024..2048 => 512,
            2048..4096 => 1024,
            _ => 2048,
        };
        block += step;
        index = at;
    }
    grid
}

/// Hashes of one prompt; half of each, as a few bits are enough to tell the prompts of one log apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sketch {
    /// Whole blocks of the prompt; 0: there is no chain of it.
    pub blocks: u32,
    /// Up to the end of the last of them: what the next turn of a conversation is found by.
    pub last: u32,
    /// Blocks of the longest match that the choice looked at.
    pub matched_blocks: u32,
    /// Up to its end.
    pub at_match: u32,
    /// How many of `grid` are there.
    pub grid_count: u8,
    /// At the blocks of [`GRID`].
    pub grid: [u32; GRID.len()],
}

impl Sketch {
    /// Of no prompt.
    pub const NONE: Sketch = Sketch {
        blocks: 0,
        last: 0,
        matched_blocks: 0,
        at_match: 0,
        grid_count: 0,
        grid: [0; GRID.len()],
    };

    /// Of a chain, of whose blocks so many were known.
    pub fn of(chain: &[PrefixHash], matched_blocks: usize) -> Sketch {
        let mut sketch = Sketch::NONE;
        sketch.write(chain, matched_blocks);
        sketch
    }

    /// The same in place of what is there.
    #[inline]
    pub fn write(&mut self, chain: &[PrefixHash], matched_blocks: usize) {
        let half = |hash: &PrefixHash| hash.0 as u32;
        let matched = matched_blocks.min(chain.len());
        self.blocks = chain.len() as u32;
        self.last = chain.last().map_or(0, half);
        self.matched_blocks = matched as u32;
        self.at_match = match matched {
            0 => 0,
            matched => half(&chain[matched - 1]),
        };
        self.grid_count = 0;
        for (place, block) in self.grid.iter_mut().zip(GRID) {
            let Some(hash) = chain.get(usize::from(block) - 1) else {
                break;
            };
            *place = half(hash);
            self.grid_count += 1;
        }
    }

    /// All that is known of it: (blocks, hash up to their end), in no order.
    pub fn points(&self) -> impl Iterator<Item = (u32, u32)> {
        let grid = GRID.iter().zip(&self.grid).take(self.grid_count.into());
        let grid = grid.map(|(block, hash)| (u32::from(*block), *hash));
        let ends = [
            (self.blocks, self.last),
            (self.matched_blocks, self.at_match),
        ];
        grid.chain(ends.into_iter().filter(|(blocks, _)| *blocks > 0))
    }
}
