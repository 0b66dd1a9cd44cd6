module github.com/sluice-net/sluice/proxy

go 1.26.0

require (
	github.com/sluice-net/sluice/kit v0.0.0
	github.com/sluice-net/sluice/model v0.0.0
	github.com/sluice-net/sluice/proto v0.0.0
	golang.org/x/sys v0.49.0
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
)

require (
	buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go v1.36.12-20260825204119-511051f7f437.1 // indirect
	github.com/stretchr/testify v1.12.1 // indirect
	go.uber.org/goleak v1.3.0 // indirect
	golang.org/x/net v0.61.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20261019180522-ce908d29299b // indirect
)

replace (
	github.com/sluice-net/sluice/kit => ../kit
	github.com/sluice-net/sluice/model => ../model
	github.com/sluice-net/sluice/proto => ../proto
)
