module github.com/sluice-net/sluice/test

go 1.26.0

require (
	github.com/cilium/ebpf v0.22.0
	github.com/containernetworking/cni v1.3.0
	github.com/sluice-net/sluice/devnode v0.0.0
	github.com/sluice-net/sluice/kit v0.0.0
	github.com/sluice-net/sluice/proto v0.0.0
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/net v0.60.0
	golang.org/x/sync v0.24.0
	golang.org/x/sys v0.49.0
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
	k8s.io/cri-api v0.36.3
)

require (
	buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go v1.36.12-20260825204119-511051f7f437.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20261019180522-ce908d29299b // indirect
)

replace (
	github.com/sluice-net/sluice/devnode => ../devnode
	github.com/sluice-net/sluice/kit => ../kit
	github.com/sluice-net/sluice/model => ../model
	github.com/sluice-net/sluice/proto => ../proto
)
