// Memory servers in this process, over any carrier.
#[allow(dead_code, unreachable_pub, reason = "each test and example uses a part of it")]
mod rack {
    use bluebridge_memserver::{Claim, Server, ServerConfig, run};
    use bluebridge_transport::Transport;
    use bluebridge_transport::memory::{Hub, MemoryTransport};
    use bluebridge_wire::address::{Fields, NODE_PREFIX_LEN};
    use bluebridge_wire::{NodeId, Space, UDP_PORT};

    /// The tenant of every rack here.
    pub const SPACE: Space = Space(1);

    /// Serves `bytes` of memory as `node`.
    pub fn serve<T: Transport + Send + 'static>(node: NodeId, bytes: u64, transport: T) -> Server {
        let seed = 0x5eed + u64::from(node.0);
        let mut config = ServerConfig::new(SPACE, node, 1, bytes, seed);
        config.claim = Claim::OnDemand;
        run(&config, vec![transport]).expect("a memory server")
    }

    /// Memory servers on a hub of this process; node 0 leads to the first of them.
    pub struct Rack {
        hub: Hub,
        _servers: Vec<Server>,
    }

    impl Rack {
        /// Starts a server per node, each with `bytes` of memory.
        pub fn start(nodes: &[NodeId], bytes: u64) -> Self {
            let hub = Hub::new(4096);
            let mut servers = Vec::new();
            for (at, node) in nodes.iter().enumerate() {
                let transport = attach(&hub, *node, UDP_PORT);
                if at == 0 {
                    hub.route(prefix(NodeId::ANY), &[transport.id()]).expect("it is attached");
                }
                servers.push(serve(*node, bytes, transport));
            }
            Self { hub, _servers: servers }
        }

        /// A carrier for a client.
        pub fn attach(&self, node: NodeId) -> MemoryTransport {
            attach(&self.hub, node, 40_000 + node.0 % 1000)
        }
    }

    fn attach(hub: &Hub, node: NodeId, port: u16) -> MemoryTransport {
        hub.attach(port, &[prefix(node)]).expect("the node is new")
    }

    /// The addresses of a node.
    fn prefix(node: NodeId) -> ipnet::Ipv6Net {
        let first = Fields { space: SPACE, node, command: 0, tag: 0, location: 0 };
        ipnet::Ipv6Net::new(first.to_ipv6(), NODE_PREFIX_LEN).expect("a prefix")
    }
}
