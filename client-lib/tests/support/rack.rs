// Memory servers in this process, over any carrier.
#[allow(dead_code, unreachable_pub, reason = "each test and example uses a part of it")]
mod rack {
    use bluebridge_memserver::{Claim, Server, ServerConfig, run};
    use bluebridge_transport::Wakeable;
    use bluebridge_transport::memory::{EndpointId, Hub, MemoryTransport};
    use bluebridge_wire::address::{Fields, NODE_PREFIX_LEN};
    use bluebridge_wire::{Command, NodeId, Pointer, Space, UDP_PORT, WireCommand};

    /// The tenant of every rack here.
    pub const SPACE: Space = Space(1);

    /// Serves `bytes` of memory as `node`.
    pub fn serve<T: Wakeable + Send + 'static>(node: NodeId, bytes: u64, transport: T) -> Server {
        let seed = 0x5eed + u64::from(node.0);
        let mut config = ServerConfig::new(SPACE, node, 1, bytes, seed);
        config.claim = Claim::OnDemand;
        // Whatever a server must see wakes it.
        config.idle.sleep = core::time::Duration::from_secs(3600);
        run(&config, vec![transport]).expect("a memory server")
    }

    /// Memory servers on a hub of this process; node 0 stands for the first of them.
    pub struct LocalRack {
        hub: Hub,
        servers: Vec<(NodeId, Server)>,
    }

    impl LocalRack {
        /// Starts a server per node, each with `bytes` of memory.
        pub fn start(nodes: &[NodeId], bytes: u64) -> Self {
            Self::start_behind(nodes, bytes, |transport| transport)
        }

        /// Starts a server per node; `wrap` puts another carrier around each one's.
        pub fn start_behind<T: Wakeable + Send + 'static>(
            nodes: &[NodeId],
            bytes: u64,
            wrap: impl Fn(MemoryTransport) -> T,
        ) -> Self {
            let hub = Hub::new(4096);
            let mut servers = Vec::new();
            for (at, node) in nodes.iter().enumerate() {
                let transport = attach(&hub, *node, UDP_PORT);
                if at == 0 {
                    hub.route(prefix(NodeId::ANY), &[transport.id()]).expect("it is attached");
                }
                servers.push((*node, serve(*node, bytes, wrap(transport))));
            }
            Self { hub, servers }
        }

        /// Stops a node's server.
        pub fn stop(&mut self, node: NodeId) {
            self.servers.retain(|(other, _)| *other != node);
        }

        /// The carriers of an endpoint of several clients, and one on the fabric's port.
        pub fn attach_endpoint(
            &self,
            node: NodeId,
            client_count: u16,
        ) -> (Vec<MemoryTransport>, MemoryTransport) {
            let attach = |port| self.hub.attach(port, &[]).expect("there is room");
            let clients: Vec<_> = (0..client_count).map(|at| attach(41_000 + at)).collect();
            let service = attach(UDP_PORT);
            let mut ids: Vec<_> = clients.iter().map(MemoryTransport::id).collect();
            ids.push(service.id());
            self.hub.route(prefix(node), &ids).expect("they are attached");
            (clients, service)
        }

        /// Forwards requests of a command for a page to an endpoint, as a switch's redirect does.
        pub fn redirect(&self, page: Pointer, command: Command, to: &[EndpointId]) {
            let fields = Fields {
                space: page.space,
                node: page.node,
                command: WireCommand::request(command, false).bits(),
                tag: page.tag.0,
                location: page.page_start().location.bits(),
            };
            let page = ipnet::Ipv6Net::new(fields.to_ipv6(), 116).expect("a prefix");
            self.hub.route(page, to).expect("they are attached");
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
