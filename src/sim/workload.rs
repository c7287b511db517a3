//! Who sends what, and when: sessions of turns. A closed loop sends a turn some time after the answer to the last one; an
//! open loop sends each at its time, whatever becomes of the others.

use std::sync::Arc;

use super::agenda::{Ns, ns};
use super::content::{Content, mix};
use crate::route::Rng;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Time from the answer to the turn before (from the session's begin, for the first) to this one: tools, thought.
    pub pause: Ns,
    /// What is asked.
    pub content: Arc<Content>,
    /// Length of the answer, at least one token.
    pub output_tokens: u32,
}

/// Turns, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// A number of its own.
    pub name: u64,
    /// When it begins, at the earliest.
    pub start: Ns,
    /// Its requests.
    pub turns: Vec<Turn>,
}

/// Sessions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// In the order in which they begin.
    pub sessions: Vec<Session>,
    /// How many may run at a time; the others wait for one to end. `None`: each begins at its time.
    pub seats: Option<usize>,
}

impl Workload {
    /// Requests of all sessions.
    pub fn request_count(&self) -> usize {
        self.sessions
            .iter()
            .map(|session| session.turns.len())
            .sum()
    }

    /// The longest prompt with its answer, in tokens.
    pub fn tokens_max(&self) -> u32 {
        let turns = self.sessions.iter().flat_map(|session| &session.turns);
        let longest = turns
            .map(|turn| turn.content.tokens() + turn.output_tokens)
            .max();
        longest.unwrap_or(0)
    }

    /// Requests of one turn each, at given times.
    pub fn open(requests: impl IntoIterator<Item = (Ns, Content, u32)>) -> Workload {
        let session =
            |(name, (start, content, output_tokens)): (usize, (Ns, Content, u32))| Session {
                name: mix(0x0be4, name as u64),
                start,
                turns: vec![Turn {
                    pause: 0,
                    content: Arc::new(content),
                    output_tokens: output_tokens.max(1),
                }],
            };
        let sessions = requests.into_iter().enumerate().map(session);
        Workload {
            sessions: sessions.collect(),
            seats: None,
        }
    }

    /// The same `factor` times as fast. Pauses of closed loops stay.
    pub fn sped_up(mut self, factor: f64) -> Workload {
        for session in &mut self.sessions {
            session.start = (session.start as f64 / factor) as Ns;
        }
        self
    }
}

/// Draws of the usual distributions.
pub trait Draw {
    /// Uniform in 0 to 1, both ends excluded.
    fn unit(&mut self) -> f64;

    /// Exponential.
    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Normal, mean 0, deviation 1 (Box and Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.unit().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Log-normal, by its mean and the deviation of its logarithm.
    fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        (mean.ln() - sigma * sigma / 2.0 + sigma * self.normal()).exp()
    }
}

impl Draw for Rng {
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }
}

/// Agents at work on a task each: a prompt that grows by what the model said and what its tools gave, turn after turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollouts {
    /// Sessions in all.
    pub count: usize,
    /// How many run at a time.
    pub seats: usize,
    /// Time in which the first ones begin, evenly spread: sandboxes do not start all at once.
    pub ramp_s: f64,
    /// Tokens that all of them begin with: system prompt and tools.
    pub system_tokens: u32,
    /// Tokens of the task, mean.
    pub task_tokens: f64,
    /// Turns, mean of a log-normal distribution.
    pub turns: f64,
    /// Deviation of its logarithm.
    pub turns_sigma: f64,
    /// Tokens of an answer, mean (log-normal).
    pub output_tokens: f64,
    /// Deviation of its logarithm.
    pub output_sigma: f64,
    /// Tokens that a tool gives, mean (log-normal).
    pub tool_tokens: f64,
    /// Deviation of its logarithm.
    pub tool_sigma: f64,
    /// Seconds that a tool takes, mean (log-normal).
    pub tool_s: f64,
    /// Deviation of its logarithm.
    pub tool_s_sigma: f64,
    /// Context at which the agent sums up what went before and goes on with that.
    pub context_tokens_max: u32,
    /// Tokens of such a summary.
    pub summary_tokens: u32,
}

/// Fewest and most turns of a rollout.
const TURNS: (f64, f64) = (4.0, 400.0);

impl Rollouts {
    /// The sessions.
    pub fn workload(&self, seed: u64) -> Workload {
        let mut rng = Rng::new(seed);
        let session = |index: usize| {
            let start = if index < self.seats {
                self.ramp_s * index as f64 / self.seats as f64
            } else {
                0.0
            };
            self.session(index as u64, ns(start), &mut rng)
        };
        Workload {
            sessions: (0..self.count).map(session).collect(),
            seats: Some(self.seats),
        }
    }

    fn session(&self, index: u64, start: Ns, rng: &mut Rng) -> Session {
        let name = mix(0xa6e7, index);
        let turns = rng.log_normal(self.turns, self.turns_sigma);
        let count = turns.clamp(TURNS.0, TURNS.1) as usize;
        let tokens =
            |rng: &mut Rng, mean: f64, sigma: f64| rng.log_normal(mean, sigma).max(1.0) as u32;
        let mut content = Content::default();
        content.push(1, self.system_tokens);
        content.push(mix(name, 0), tokens(rng, self.task_tokens, 0.5));
        let mut era = 0;
        let mut made = Vec::with_capacity(count);
        for turn in 0..count {
            let output_tokens = tokens(rng, self.output_tokens, self.output_sigma);
            let pause = match turn {
                0 => 0,
                _ => ns(rng.log_normal(self.tool_s, self.tool_s_sigma)),
            };
            made.push(Turn {
                pause,
                content: Arc::new(content.clone()),
                output_tokens,
            });
            let result = tokens(rng, self.tool_tokens, self.tool_sigma);
            content.push(mix(name, era), output_tokens + result);
            if content.tokens() > self.context_tokens_max {
                era += 1;
                content.truncate(self.system_tokens);
                content.push(mix(name, era), self.summary_tokens);
            }
        }
        Session {
            name,
            start,
            turns: made,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rollouts() -> Rollouts {
        Rollouts {
            count: 200,
            seats: 50,
            ramp_s: 100.0,
            system_tokens: 1000,
            task_tokens: 500.0,
            turns: 40.0,
            turns_sigma: 0.5,
            output_tokens: 200.0,
            output_sigma: 0.8,
            tool_tokens: 800.0,
            tool_sigma: 1.0,
            tool_s: 5.0,
            tool_s_sigma: 1.0,
            context_tokens_max: 30_000,
            summary_tokens: 2000,
        }
    }

    #[test]
    fn turns_repeat_what_went_before_unless_it_was_summed_up() {
        let workload = rollouts().workload(1);
        let (mut repeated, mut summed) = (0, 0);
        for session in &workload.sessions {
            for pair in session.turns.windows(2) {
                let mut before = (*pair[0].content).clone();
                let after = &pair[1].content;
                assert!(after.tokens() <= 30_000);
                if after.tokens() <= before.tokens() {
                    summed += 1;
                    continue;
                }
                before.push(u64::MAX, after.tokens() - before.tokens());
                let (mut a, mut b) = (Vec::new(), Vec::new());
                pair[0].content.chain(&mut a);
                after.chain(&mut b);
                assert_eq!(a[..], b[..a.len()]);
                repeated += 1;
            }
        }
        assert!(repeated > 5000 && summed > 100, "{repeated} {summed}");
    }

    #[test]
    fn draws_have_the_means_they_are_asked_for() {
        let mut rng = Rng::new(5);
        let mean = |draw: &mut dyn FnMut() -> f64| (0..100_000).map(|_| draw()).sum::<f64>() / 1e5;
        let exponential = mean(&mut || rng.exponential(3.0));
        let log_normal = mean(&mut || rng.log_normal(40.0, 0.5));
        assert!((exponential - 3.0).abs() < 0.05, "{exponential}");
        assert!((log_normal - 40.0).abs() < 0.5, "{log_normal}");
        assert_eq!(rollouts().workload(7), rollouts().workload(7));
        assert_ne!(rollouts().workload(7), rollouts().workload(8));
    }
}
