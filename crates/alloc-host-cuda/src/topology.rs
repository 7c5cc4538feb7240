//! The NUMA nodes of the host, and which device is near which.

use alloc_core::host::NodeId;
use cuda_driver::{Attribute, Device};
use std::fs;
use std::path::Path;

/// Nodes by our numbers, which have no gaps, unlike the system's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Topology {
    /// The system's number of each node.
    nodes: Vec<u32>,
    /// The node of each device, in order of devices.
    devices: Vec<NodeId>,
}

impl Topology {
    /// Reads it from the system. What cannot be read counts as one node.
    pub(crate) fn read(devices: &[Device]) -> Topology {
        let online = fs::read_to_string("/sys/devices/system/node/has_memory").ok();
        let nodes = online.as_deref().and_then(parse_list).unwrap_or_else(|| vec![0]);
        let numbers: Vec<_> = devices.iter().map(system_node).collect();
        Topology::new(nodes, &numbers)
    }

    fn new(nodes: Vec<u32>, devices: &[Option<u32>]) -> Topology {
        let ours = |number: &Option<u32>| {
            let at = number.and_then(|number| nodes.iter().position(|node| *node == number));
            NodeId::new(at.unwrap_or(0) as u16)
        };
        let devices = devices.iter().map(ours).collect();
        Topology { nodes, devices }
    }

    pub(crate) fn node_count(&self) -> u16 {
        self.nodes.len() as u16
    }

    /// The node near a device.
    pub(crate) fn of_device(&self, device: usize) -> Option<NodeId> {
        self.devices.get(device).copied()
    }

    /// The processors of a node; none if there is only one node, or if the system does not say.
    pub(crate) fn processors(&self, node: NodeId) -> Vec<u32> {
        let list = self.number(node).and_then(|number| {
            fs::read_to_string(format!("/sys/devices/system/node/node{number}/cpulist")).ok()
        });
        list.as_deref().and_then(parse_list).unwrap_or_default()
    }

    /// The system's number of a node, or `None` if there is only one.
    pub(crate) fn number(&self, node: NodeId) -> Option<u32> {
        let number = self.nodes.get(node.index()).copied()?;
        (self.nodes.len() > 1).then_some(number)
    }
}

/// The system's number of the node near a device, if it says.
fn system_node(device: &Device) -> Option<u32> {
    let [domain, bus, slot] = [Attribute::PciDomain, Attribute::PciBus, Attribute::PciDevice]
        .map(|attribute| device.attribute(attribute).ok());
    let address = format!("{:04x}:{:02x}:{:02x}.0", domain?, bus?, slot?);
    let path = Path::new("/sys/bus/pci/devices").join(address).join("numa_node");
    // -1 means that the system does not know.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reads a list of the form `0-2,7`.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    (!numbers.is_empty()).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_system_are_read() {
        assert_eq!(parse_list("0\n"), Some(vec![0]));
        assert_eq!(parse_list("0-1,4,6-7"), Some(vec![0, 1, 4, 6, 7]));
        assert_eq!(parse_list(""), None);
        assert_eq!(parse_list("0-x"), None);
    }

    #[test]
    fn our_numbers_have_no_gaps() {
        let topology = Topology::new(vec![0, 4], &[Some(4), Some(0), None, Some(9)]);
        let nodes = [0, 1, 2, 3].map(|device| topology.of_device(device));
        assert_eq!(nodes, [1, 0, 0, 0].map(|node| Some(NodeId::new(node))));
        assert_eq!(topology.of_device(4), None);
        assert_eq!(topology.number(NodeId::new(1)), Some(4));
        assert_eq!(Topology::new(vec![3], &[]).number(NodeId::new(0)), None, "nothing to choose");
    }
}
