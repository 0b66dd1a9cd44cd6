// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// NotFound says that no object of a kind has the name. list is the command that lists those that there are: "service
// list".
func NotFound(kind, name, list string) error {
	return fmt.Errorf("no %s %s; see `sluice %s`", kind, output.Printable(name), list)
}

// OrNotFound returns err. If it is a service's answer NotFound, the message is the one of NotFound; code and details
// stay.
func OrNotFound(err error, kind, name, list string) error {
	if status.Code(err) != codes.NotFound {
		return err
	}
	said := status.Convert(err).Proto()
	said.Message = NotFound(kind, name, list).Error()
	return status.ErrorProto(said)
}
