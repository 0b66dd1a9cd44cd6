// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// TestKernelRootChangesAndTheGroupReads calls every method as several users; the kernel reports the user to the server.
func TestKernelRootChangesAndTheGroupReads(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: it calls as several users")
	}
	socket := serveAll(t)
	changes := []string{
		"AuditMaps", "CreateEndpoint", "DeleteEndpoint", "DumpMap", "FlushConnections",
		"ReportDNSMessages",
		"ReclaimEndpoints", "SetAuditMode", "SetLogLevel", "UpdateEndpoint",
	}
	for uid, refused := range map[uintptr][]string{
		0:     nil,
		64999: changes,
		65701: changes, // identity, which changes endpoints through a stream that the datapath opens
		65703: changes, // policy
		65706: changes, // the datapath itself
	} {
		conn := dialAs(t, socket, uid)
		called := 0
		for _, service := range []grpc.ServiceDesc{
			datapathv1.ConnectionService_ServiceDesc, datapathv1.DatapathService_ServiceDesc,
			datapathv1.ObserverService_ServiceDesc, datapathv1.DNSReportService_ServiceDesc,
			sharesv1.SharesService_ServiceDesc, statusv1.ProcessService_ServiceDesc,
		} {
			names := map[string]func(string) error{}
			for _, m := range service.Methods {
				names[m.MethodName] = func(method string) error {
					return conn.Invoke(t.Context(), method, &emptypb.Empty{}, &emptypb.Empty{})
				}
			}
			for i := range service.Streams {
				names[service.Streams[i].StreamName] = func(method string) error {
					stream, err := conn.NewStream(t.Context(), &service.Streams[i], method)
					if err != nil {
						return err
					}
					if err := stream.SendMsg(&emptypb.Empty{}); err != nil {
						return err
					}
					return stream.RecvMsg(&emptypb.Empty{})
				}
			}
			for name, call := range names {
				called++
				err := call("/" + service.ServiceName + "/" + name)
				want := slices.Contains(refused, name)
				if got := status.Code(err) == codes.PermissionDenied; got != want || err == nil {
					t.Errorf("%s as uid %d: %v, want it refused: %t", name, uid, err, want)
				}
			}
		}
		if called != len(Methods()) {
			t.Errorf("%d methods are called of %d", called, len(Methods()))
		}
	}
}

// serveAll serves every method. All implementations fail.
func serveAll(t *testing.T) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "datapath")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })      //nolint:errcheck // a leak shows elsewhere
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // another user connects
		t.Fatal(err)
	}
	socket = filepath.Join(dir, "s", "datapath.sock")
	l, err := rpc.Listen(socket, rpc.ListenOptions{Mode: 0o666, DirMode: 0o755})
	if err != nil {
		t.Fatal(err)
	}
	s, err := rpc.NewServer(rpc.Options{Methods: Methods(), Register: func(r grpc.ServiceRegistrar) {
		datapathv1.RegisterConnectionServiceServer(r, &datapathv1.UnimplementedConnectionServiceServer{})
		datapathv1.RegisterDatapathServiceServer(r, &datapathv1.UnimplementedDatapathServiceServer{})
		datapathv1.RegisterObserverServiceServer(r, &datapathv1.UnimplementedObserverServiceServer{})
		datapathv1.RegisterDNSReportServiceServer(r, &datapathv1.UnimplementedDNSReportServiceServer{})
		sharesv1.RegisterSharesServiceServer(r, sharesv1.UnimplementedSharesServiceServer{})
		statusv1.RegisterProcessServiceServer(r, statusv1.UnimplementedProcessServiceServer{})
	}})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return socket
}

// dialAs connects as another user.
func dialAs(t *testing.T, socket string, uid uintptr) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(servicetest.DialerAs(socket, uid)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
