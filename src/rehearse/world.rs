//! The ranks of a world that is bigger than this machine: which of them are started, and the variables that a launcher
//! would give them.

use std::{ffi::OsString, path::Path};

/// GPUs of a node, where the user does not say.
const GPUS_PER_NODE: u32 = 8;

/// Each rank is a process with a PyTorch of its own, which takes some hundred MiB.
const MOST_PROCESSES: usize = 64;

/// Why ranks cannot be started.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// There is no such rank.
    #[error("--rank {rank}: the ranks of a world of {size} are 0 to {last}", last = size - 1)]
    Outside {
        /// The rank.
        rank: u32,
        /// The size of the world.
        size: u32,
    },
    /// One machine does not hold them.
    #[error("{0} ranks are too many for one machine (at most {MOST_PROCESSES}): name some of them, such as --rank 0,1")]
    TooMany(usize),
    /// The command starts ranks itself.
    #[error(
        "--ranks starts one process per rank, and '{0}' starts ranks itself: leave out --ranks, or give the command that \
         each rank runs, such as `python train.py`"
    )]
    Launcher(String),
}

/// A world of ranks, of which some or all are rehearsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    size: u32,
    started: Vec<u32>,
    gpus_per_node: u32,
}

impl World {
    /// A world of `size` ranks, of which the named ones are started, or all. Nodes have 8 GPUs, or as many as there are
    /// ranks if these are fewer.
    pub fn new(size: u32, named: &[u32], gpus_per_node: Option<u32>) -> Result<World, WorldError> {
        if let Some(&rank) = named.iter().find(|&&rank| rank >= size) {
            return Err(WorldError::Outside { rank, size });
        }
        let mut started = if named.is_empty() { (0..size).collect() } else { named.to_vec() };
        started.sort_unstable();
        started.dedup();
        if started.len() > MOST_PROCESSES {
            return Err(WorldError::TooMany(started.len()));
        }
        Ok(World { size, started, gpus_per_node: gpus_per_node.unwrap_or(GPUS_PER_NODE.min(size)) })
    }

    /// The ranks that are started, in order. There is at least one.
    #[must_use]
    pub fn started(&self) -> &[u32] {
        &self.started
    }

    /// GPUs that each rank sees.
    #[must_use]
    pub fn gpus_per_node(&self) -> u32 {
        self.gpus_per_node
    }

    /// Whether all ranks are started, so that they can exchange values.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.started.len() == self.size as usize
    }

    /// The variables that torchrun gives a rank.
    #[must_use]
    pub fn variables(&self, rank: u32, port: u16) -> Vec<(&'static str, String)> {
        let (node, local) = (rank / self.gpus_per_node, rank % self.gpus_per_node);
        let on_node = self.gpus_per_node.min(self.size - node * self.gpus_per_node);
        let number = |value: u32| value.to_string();
        vec![
            ("RANK", number(rank)),
            ("LOCAL_RANK", number(local)),
            ("WORLD_SIZE", number(self.size)),
            ("LOCAL_WORLD_SIZE", number(on_node)),
            ("GROUP_RANK", number(node)),
            ("GROUP_WORLD_SIZE", number(self.size.div_ceil(self.gpus_per_node))),
            ("ROLE_RANK", number(rank)),
            ("ROLE_WORLD_SIZE", number(self.size)),
            ("ROLE_NAME", "default".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("TORCHELASTIC_RUN_ID", "rehearsal".to_owned()),
            ("TORCHELASTIC_RESTART_COUNT", number(0)),
            ("TORCHELASTIC_MAX_RESTARTS", number(0)),
        ]
    }
}

/// The launcher that a command starts, if it is one.
#[must_use]
pub fn launcher(words: &[OsString]) -> Option<String> {
    let names = ["torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun"];
    let modules = ["torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed"];
    let program = Path::new(words.first()?).file_name()?.to_string_lossy().into_owned();
    if names.contains(&program.as_str()) {
        return Some(program);
    }
    // Python's own options come first; behind its script, `-m` is an option of the script.
    let options = words.iter().skip(1).take_while(|word| word.to_string_lossy().starts_with('-'));
    let place = options.into_iter().position(|word| word == "-m")? + 2;
    let module = words.get(place).map(|word| word.to_string_lossy().into_owned());
    module.filter(|module| modules.contains(&module.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(world: &World, rank: u32, name: &str) -> String {
        let all = world.variables(rank, 1234);
        all.into_iter().find(|(other, _)| *other == name).map(|(_, value)| value).unwrap()
    }

    #[test]
    fn ranks_are_laid_out_on_nodes() {
        let world = World::new(20, &[17, 5, 17], None).unwrap();
        assert_eq!((world.started(), world.is_complete(), world.gpus_per_node()), (&[5, 17][..], false, 8));
        let of = |name| variable(&world, 17, name);
        assert_eq!((of("LOCAL_RANK"), of("GROUP_RANK"), of("GROUP_WORLD_SIZE")), ("1".into(), "2".into(), "3".into()));
        assert_eq!((of("LOCAL_WORLD_SIZE"), of("WORLD_SIZE")), ("4".into(), "20".into()), "the last node is not full");
        assert_eq!(variable(&world, 5, "LOCAL_WORLD_SIZE"), "8");
        let small = World::new(2, &[], None).unwrap();
        assert_eq!((small.gpus_per_node(), small.is_complete()), (2, true));
        assert_eq!(World::new(1024, &[], None), Err(WorldError::TooMany(1024)));
        assert!(World::new(1024, &[0, 1023], None).is_ok());
        assert_eq!(World::new(2, &[2], None), Err(WorldError::Outside { rank: 2, size: 2 }));
    }

    #[test]
    fn launchers_are_recognised() {
        let of = |text: &str| launcher(&text.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert_eq!(of("/opt/bin/torchrun --nproc-per-node 8 train.py").as_deref(), Some("torchrun"));
        assert_eq!(of("python -m torch.distributed.run train.py").as_deref(), Some("torch.distributed.run"));
        assert_eq!(of("python -u -m deepspeed train.py").as_deref(), Some("deepspeed"));
        assert_eq!((of("python train.py"), of("python -m train")), (None, None));
        assert_eq!(of("python train.py -m deepspeed"), None);
    }
}
