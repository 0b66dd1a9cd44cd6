module github.com/sluice-net/sluice/cmd/sluice

go 1.26.0

require (
	buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go v1.36.12-20260825204119-511051f7f437.1
	buf.build/go/protovalidate v1.4.0
	github.com/sluice-net/sluice/devnode v0.0.0
	github.com/sluice-net/sluice/kit v0.0.0
	github.com/sluice-net/sluice/model v0.0.0
	github.com/sluice-net/sluice/proto v0.0.0
	github.com/spf13/cobra v1.10.2
	github.com/spf13/pflag v1.0.10
	go.yaml.in/yaml/v3 v3.0.6
	golang.org/x/net v0.61.0
	golang.org/x/sync v0.24.0
	golang.org/x/sys v0.49.0
	google.golang.org/genproto/googleapis/rpc v0.0.0-20261019180522-ce908d29299b
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
)

require (
	cel.dev/cel-go v0.32.0 // indirect
	cel.dev/expr v0.25.3 // indirect
	github.com/antlr4-go/antlr/v4 v4.13.1 // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/sluice-net/sluice/store v0.0.0
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	go.uber.org/goleak v1.3.0 // indirect
	golang.org/x/exp v0.0.0-20260820142414-ca536658362e // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/genproto/googleapis/api v0.0.0-20260819154853-08b0e4226688 // indirect
)

replace (
	github.com/sluice-net/sluice/devnode => ../../devnode
	github.com/sluice-net/sluice/kit => ../../kit
	github.com/sluice-net/sluice/model => ../../model
	github.com/sluice-net/sluice/proto => ../../proto
)

replace github.com/sluice-net/sluice/store => ../../store
