// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package reasontest checks that the tests of a server receive every error reason of its API from real calls. A table
// test of the error mapping alone does not show which reason a caller receives if the core wraps one error in another.
package reasontest

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// answers contains the reasons in the answers of servers in this process.
var answers sync.Map // rpcerr.Reason -> struct{}

// Note records an answer that a client received on a connection of its own, and returns it.
func Note(err error) error { return note(err) }

func note(err error) error {
	if reason, ok := rpcerr.ReasonIn(err); ok {
		answers.Store(reason, struct{}{})
	}
	return err
}

// Record returns the connection, with all answers recorded.
func Record(c grpc.ClientConnInterface) grpc.ClientConnInterface { return recorded{c} }

type recorded struct{ grpc.ClientConnInterface }

func (r recorded) Invoke(ctx context.Context, method string, args, reply any, o ...grpc.CallOption) error {
	return note(r.ClientConnInterface.Invoke(ctx, method, args, reply, o...))
}

func (r recorded) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, o ...grpc.CallOption,
) (grpc.ClientStream, error) {
	s, err := r.ClientConnInterface.NewStream(ctx, desc, method, o...)
	if err != nil {
		return nil, note(err)
	}
	return stream{s}, nil
}

type stream struct{ grpc.ClientStream }

func (s stream) RecvMsg(m any) error { return note(s.ClientStream.RecvMsg(m)) }

// Run calls run, which runs the tests of a package, and returns the exit code. It also fails if a value of the
// enumeration of never occurred in an answer, except INTERNAL and the values in except, which maps a value to the
// explanation. If a flag selects tests, missing values are not an error.
func Run(run func() int, of protoreflect.Enum, except map[string]string) int {
	code := run()
	if code != 0 || selected() {
		return code
	}
	for _, problem := range problems(of, except) {
		fmt.Fprintln(os.Stderr, "reasontest:", problem)
		code = 1
	}
	return code
}

// selected reports whether flags exclude tests.
func selected() bool {
	return slices.ContainsFunc([]string{"test.run", "test.skip", "test.list", "test.short"}, func(name string) bool {
		f := flag.Lookup(name)
		return f != nil && f.Value.String() != f.DefValue
	})
}

func problems(of protoreflect.Enum, except map[string]string) (all []string) {
	values := of.Descriptor().Values()
	for i := range values.Len() {
		v := values.Get(i)
		name := strings.TrimPrefix(string(v.Name()), "ERROR_REASON_")
		_, given := answers.Load(rpcerr.Of(of.Type().New(v.Number())))
		why, excepted := except[name]
		switch {
		case v.Number() == 0, name == "INTERNAL": // never sent, or sent only because of a bug
		case given && excepted:
			all = append(all, fmt.Sprintf("%s was answered, but is listed as an exception: %s", name, why))
		case !given && !excepted:
			all = append(all, fmt.Sprintf("no test provokes %s", name))
		}
	}
	return all
}
