// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package reasontest holds that the tests of a server provoke each reason of its API by
// calls. A test that gives a table of errors one error of each kind does not show which
// reason a caller gets where the core wraps one error in another.
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

// answers are the reasons that servers have answered with in this process.
var answers sync.Map // rpcerr.Reason -> struct{}

func note(err error) error {
	if reason, ok := rpcerr.ReasonIn(err); ok {
		answers.Store(reason, struct{}{})
	}
	return err
}

// Record returns the connection with every answer recorded.
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

// Run returns the exit code of run, which runs the tests of a package. If they pass, it fails
// where a value of of's enumeration was in no answer, INTERNAL aside. except are the values for which that is
// so, each with why. Where a flag selects tests, nothing is missed.
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

// selected says whether flags leave tests out.
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
		case v.Number() == 0, name == "INTERNAL": // never sent; a bug, of a fake too
		case given && excepted:
			all = append(all, fmt.Sprintf("%s was answered, and is an exception: %s", name, why))
		case !given && !excepted:
			all = append(all, fmt.Sprintf("no test provokes %s", name))
		}
	}
	return all
}
