// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"slices"
	"sync"
	"testing"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/protobuf/proto"
)

// asked is a validator that records the names of the messages it validates.
type asked struct {
	mu    sync.Mutex
	names []string // guarded by mu
}

func (a *asked) Validate(m proto.Message, _ ...protovalidate.ValidationOption) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.names = append(a.names, string(m.ProtoReflect().Descriptor().FullName()))
	return nil
}

func TestServeCompilesTheRulesOfPreparedRequestsAlone(t *testing.T) {
	methods := table()
	m := methods[pb.TestService_UnaryCall_FullMethodName]
	m.Prepared = true
	methods[pb.TestService_UnaryCall_FullMethodName] = m
	server, err := NewServer(Options{
		Register: func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, &testService{}) }, Methods: methods,
	})
	if err != nil {
		t.Fatal(err)
	}
	a := &asked{}
	server.validator = a
	server.Stop()
	// Serve returns at once, but only after the rules are compiled.
	if err := server.Serve(listen(t, shortDir(t)+"/s.sock", ListenOptions{})); err != nil {
		t.Fatal(err)
	}
	if want := []string{"grpc.testing.SimpleRequest"}; !slices.Equal(a.names, want) {
		t.Errorf("compiled for %v, want %v", a.names, want)
	}
}
