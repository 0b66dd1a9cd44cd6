// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command call makes one call to the test service on a socket and prints the code.
package main

import (
	"context"
	"fmt"
	"os"

	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/client"
)

func main() {
	cc, err := client.Dial(os.Args[1], client.Options{})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_, err = pb.NewTestServiceClient(cc).EmptyCall(context.Background(), &pb.Empty{})
	fmt.Println(status.Code(err))
}
