//! What the machine, the processes and the threads say of themselves: `/proc`, read at a window's ends only.

use std::fs;
use std::path::Path;
use std::process::Command;

/// A process whose CPU time and memory are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(pub u32);

impl Process {
    /// CPU time of its threads that live, ns.
    pub fn cpu_ns(&self) -> Option<u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0)).ok()?;
        let times = tasks
            .flatten()
            .filter_map(|task| schedstat_ns(&task.path().join("schedstat")));
        Some(times.map(|(busy_ns, _)| busy_ns).sum())
    }

    /// Resident memory, bytes.
    pub fn rss_bytes(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    }
}

/// CPU time of the calling thread, and how long it was ready and did not run, ns. Zeros where the kernel does not say.
pub fn thread_times_ns() -> (u64, u64) {
    schedstat_ns(Path::new("/proc/thread-self/schedstat")).unwrap_or((0, 0))
}

fn schedstat_ns(path: &Path) -> Option<(u64, u64)> {
    let text = fs::read_to_string(path).ok()?;
    let mut words = text.split_whitespace().map(str::parse);
    Some((words.next()?.ok()?, words.next()?.ok()?))
}

/// The processor's name and count, and the kernel.
pub fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{} x {cpus}, Linux {}",
        model.map_or("unknown", |(_, model)| model),
        kernel.trim()
    )
}

/// The commit of the sources this program lies in, if it lies in a work tree.
pub fn commit() -> Option<String> {
    let program = std::env::current_exe().ok()?;
    let output = Command::new("git")
        .arg("-C")
        .arg(program.parent()?)
        .args(["describe", "--always", "--dirty"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_and_its_process_are_seen_to_be_busy() {
        let me = Process(std::process::id());
        let (before, process_before) = (thread_times_ns().0, me.cpu_ns().unwrap());
        let end = std::time::Instant::now() + std::time::Duration::from_millis(50);
        while std::time::Instant::now() < end {
            std::hint::spin_loop();
        }
        // A busy machine may leave us less than the 50 ms.
        assert!(thread_times_ns().0 > before);
        assert!(me.cpu_ns().unwrap() > process_before);
        assert!(me.rss_bytes().unwrap() > 1 << 20);
        assert_eq!(Process(u32::MAX).cpu_ns(), None);
        assert!(machine().contains("Linux "));
    }
}
